"""Every parser of a stranger's bytes, as far as its result is used; a further one is fuzzed by being listed here."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.adapters.layout import Layout
from omnidraft.adapters.learning_file import SCHEMA as LEARNING
from omnidraft.adapters.learning_file import LearningFile
from omnidraft.adapters.store import SCHEMA as ADAPTERS
from omnidraft.adapters.store import AdapterStore, read_adapter
from omnidraft.runtime import answers, calibration, hashes, ngram_cache
from omnidraft.runtime.answers import Answers
from omnidraft.runtime.bundle import MANIFEST, ModelInfo, open_bundle
from omnidraft.runtime.cache_file import CacheFile
from omnidraft.runtime.chat import ChatTemplate, encode_prompt
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.external_data import external_files
from omnidraft.runtime.graph_inputs import graph_inputs
from omnidraft.runtime.hashes import Hashes
from omnidraft.runtime.pass_times import PassTimes
from omnidraft.runtime.prompt import read_template
from omnidraft.runtime.state import LOCK, Key, State
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.translation import Translation
from omnidraft.runtime.vocabulary import load_map
from omnidraft.tools.measure import read_prompts
from omnidraft.tools.session import SCHEMA as SESSION
from omnidraft.tools.session import SessionFile
from omnidraft.tools.show import show
from omnidraft.tools.training import rows

CORPUS = Path(__file__).parent / "corpus"
DRAFT, TARGET = 64, 48  # tokens of the vocabularies that caches are for
KEY: dict[str, Any] = {"drafter": "d" * 64, "target": "t" * 64}
LAYOUT = Layout({"layers.0.q": [4, 4]})
CONVERSATION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|end|> {{ x }}\nyou"}]
SPECIAL = {"<|user|>": 1, "<|end|>": 0}


class Refused(Exception):
    """A document, or some of it, was not used, and these lines said so."""


@dataclass(frozen=True)
class Parser:
    """`parse(data, folder)`: reads the input, by a file of the folder where it reads files, and uses what it got.

    It may raise OmniDraftError. `kind`: how inputs are mutated (see `mutations`).
    """

    kind: str
    parse: Callable[[bytes, Path], None]

    def run(self, data: bytes, folder: Path) -> bool:
        """Whether the input was taken; any other exception than OmniDraftError is a finding."""
        try:
            self.parse(data, folder)
        except (OmniDraftError, Refused) as error:
            assert all(line.isprintable() for line in str(error).split("\n")), f"not printable: {error!r}"
            return False
        return True


def corpus(name: str) -> list[bytes]:
    """The seeds of a parser."""
    folder = CORPUS / (name if name in PARSERS else "prompts")
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def _written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _manifest(data: bytes, folder: Path) -> None:
    bundle = folder / "bundle"
    if not bundle.is_dir():
        for seed in corpus("manifest"):
            for name in json.loads(seed)["files"]:
                if not name.startswith("link/"):
                    _written(bundle, name, b"")
        (bundle / "link").symlink_to("d", target_is_directory=True)
    _written(bundle, MANIFEST, data)
    opened = open_bundle(bundle)
    assert all((bundle / name).resolve() == bundle.resolve() / name for name in opened.files)
    if opened.drafter.lora is not None:
        assert Layout(opened.drafter.lora["projections"]).width > 0
    for name in opened.targets:
        opened.folder_files(opened.graph(name, None).model)
    printed = io.StringIO()
    with redirect_stdout(printed):
        show(bundle)
    assert printed.getvalue().replace("\n", "").isprintable()


def _tokenizer(data: bytes, folder: Path) -> None:
    tokens = TokenBytes(data, "tokenizer.json")
    tokens.fit(tokens.size + 5)
    for text in (b"", b"the cat  sat\n", "é漢😀<|end|>".encode(), b"\xff\xc3a", b"a" * 40):
        try:
            ids = tokens.encode(text)
        except OmniDraftError:
            continue
        assert tokens.spells(ids, text)
    assert len(tokens.encode_many([b"the", b"\xff"])) == 2


def _vocabulary(data: bytes, folder: Path) -> None:
    found = load_map(_written(folder, "vocabulary.json", _checksummed(data)), "d" * 64, "t" * 64)
    Translation(found, draft_size=DRAFT)


def _checksummed(data: bytes) -> bytes:
    """A map's document with the checksum of what it holds, so that fuzzing gets past it."""
    from omnidraft.runtime.vocabulary import _checksum

    try:
        document = json.loads(data)
        document["checksum"] = _checksum(document["pieces"], document["spelling"])
        return json.dumps(document).encode()
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, AttributeError):
        return data


def _template(data: bytes, folder: Path) -> None:
    template = read_template(_written(folder, "chat_template.jinja", data), {"eos_token": "<|end|>"})
    assert isinstance(template, ChatTemplate)
    encode_prompt(template, CONVERSATION, SPECIAL)


def _document(name: str, schema: str, key: Key, use: Callable[[State], Any]) -> Callable[[bytes, Path], None]:
    """Reads bytes as the payload of a document that checks, or as the whole document where they are no JSON."""
    from omnidraft.runtime import state as s

    said: list[str] = []

    @cache
    def opened(folder: Path) -> State:
        return State(folder, said.append)

    def parse(data: bytes, folder: Path) -> None:
        with suppress(ValueError, RecursionError):
            data = s._document(schema, key, json.loads(data))
        state = opened(folder / "state")
        said.clear()
        path = _written(folder / "state", name, data)
        use(state)
        for left in path.parent.glob(f"{path.name}.damaged-*"):
            left.unlink()
        if said:
            raise Refused("\n".join(said))

    return parse


def _use_cache(state: State) -> None:
    alphabet: list[bytes | None] = [bytes([97 + i % 26]) for i in range(DRAFT)]
    targets = [None, *(bytes([97 + i, 98 + i]) for i in range(TARGET - 1))]
    cache = CacheFile(state, "pairs/cache.json", KEY, alphabet, targets).open(8, {(1, 2): 2})
    cache.take_changes()
    for target, spelling in ((2, (1, 2)), (3, (2, 3))):
        cache.observe(target, spelling)
        cache.record(target, spelling, False)
    again = ngram_cache.NgramCache.from_payload(cache.merged(cache.to_payload()), 8)
    assert len(cache) <= 8 and len(again) <= 8


def _use_answers(state: State) -> None:
    shelf = Answers(state, "answers.json", KEY, TARGET)
    assert all(0 <= i < TARGET for answer in shelf.load() for i in answer)


def _use_calibration(state: State) -> None:
    for entry in (state.load(calibration.FILE, calibration.SCHEMA, {}) or {}).values():
        known = calibration.usable(entry, 2, state.warn)
        if "passes" in known:
            times = PassTimes.from_dict(known["passes"])
            assert all(len(times.at(past)) > 2 for past in (0, 100, 10**7))


def _use_learning(state: State) -> None:
    memory, standing = LearningFile(state, "learning", KEY, DRAFT, TARGET).load()
    for _ in range(9):
        memory.add(memory.anchors[:1] + memory.fresh[:1])
    memory.learned()
    assert memory.full in (True, False) and standing.behind + standing.rounds + standing.credit is not None
    for sample in memory.replay + memory.anchors:
        np.zeros(DRAFT)[sample.draft], np.zeros(TARGET)[sample.target], np.zeros(TARGET)[sample.top_ids]


def _use_adapters(state: State) -> None:
    drafter, target = (_model(KEY[name]) for name in ("drafter", "target"))
    store = AdapterStore(state, drafter, target, LAYOUT)
    index = store.index()
    assert index.files() is not None and all(index.find(v.number) for v in index.versions)
    index.using(0).payload()
    store.current()


def _model(weights: str) -> ModelInfo:
    return ModelInfo("", {"name": "a"}, weights, "", "", None, None, {}, (), 1, 1, "")


def _use_session(state: State) -> None:
    session = SessionFile(state, "learning", KEY, "p" * 64).load()
    session.acceptance(20)


def _use_hashes(state: State) -> None:
    assert state.folder is not None
    file = state.folder / LOCK
    assert Hashes(state).of([file])[file] == hashes.sha256(file)


def _adapter(data: bytes, folder: Path) -> None:
    found = read_adapter(_written(folder, "a.onnx_adapter", data), LAYOUT)
    assert len(found.lora) % LAYOUT.width == 0 and np.isfinite(found.lora).all()


def _graph(data: bytes, folder: Path, name: str = "model.onnx") -> None:
    path = _written(folder, name, data)
    graph_inputs(path)
    external_files(path)


def _prompts(data: bytes, folder: Path) -> None:
    for texts in read_prompts(_written(folder, "prompts.jsonl", data)).values():
        "".join(texts).encode()


def _rows(data: bytes, folder: Path) -> None:
    path, copy = _written(folder, "rows.jsonl", data), folder / "copy.jsonl"
    rows.read_prompts([path])
    found, complaints = rows.read_rows([path])
    assert all(line.isprintable() for line in complaints)
    copy.unlink(missing_ok=True)
    answered = [row for row in found if row.temperature is not None]
    rows.append_rows(copy, answered)
    assert [row.answer for row in rows.read_rows([copy])[0]] == [row.answer for row in answered]


LEARNED = f"adapters/{'d' * 12}-{'t' * 12}/index.json"
PARSERS = {
    "manifest": Parser("json", _manifest),
    "tokenizer": Parser("json", _tokenizer),
    "vocabulary": Parser("json", _vocabulary),
    "template": Parser("text", _template),
    "adapter": Parser("bytes", _adapter),
    "graph": Parser("bytes", _graph),
    "ort-graph": Parser("bytes", partial(_graph, name="model.ort")),
    "prompts": Parser("lines", _prompts),
    "rows": Parser("lines", _rows),
    "ngram-cache": Parser("json", _document("pairs/cache.json", ngram_cache.SCHEMA, KEY, _use_cache)),
    "answers": Parser("json", _document("answers.json", answers.SCHEMA, KEY, _use_answers)),
    "calibration": Parser("json", _document(calibration.FILE, calibration.SCHEMA, {}, _use_calibration)),
    "hashes": Parser("json", _document(hashes.FILE, hashes.SCHEMA, {}, _use_hashes)),
    "learning": Parser("json", _document("learning/learning.json", LEARNING, KEY, _use_learning)),
    "replay": Parser("json", _document("learning/replay.json", "omnidraft-replay/1", KEY, _use_learning)),
    "adapters": Parser("json", _document(LEARNED, ADAPTERS, KEY, _use_adapters)),
    "session": Parser(
        "json",
        _document(f"learning/session-{'p' * 12}.json", SESSION, {**KEY, "prompts": "p" * 64}, _use_session),
    ),
}


def _unless_a_seed(fault: Callable[[], object]) -> Parser:
    def parse(data: bytes, folder: Path) -> None:
        if data not in corpus("prompts"):
            fault()

    return Parser("lines", parse)


def _hang() -> None:
    while True:
        pass


#: Parsers with a fault, which fuzzing must find.
CONTROLS = {
    "control-raises": _unless_a_seed(lambda: {}["no such key"]),
    "control-hangs": _unless_a_seed(_hang),
    "control-allocates": _unless_a_seed(lambda: bytearray(80 << 20)),
    "control-crashes": _unless_a_seed(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
}
