"""Peers in their processes: what they say is what the same weights say, and one that cannot take part says why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_model, small_tokenizer, write_checkpoint, write_gguf
from conftest import PRECISIONS, Loaded

from omnidraft.models import registry
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.peers import against
from omnidraft.tools.peers.gguf_types import converted, type_of
from omnidraft.tools.peers.talk import Request, Worker

GREEDY = vars(Sampling())
TEXT = "The boat came back before dawn, and"
NEW, STOP = 24, 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "checkpoint")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return list(small_tokenizer().encode(TEXT).ids)


def greedy(prompt: list[int], **shape: int) -> list[int]:
    """What the random model says, pass by pass over the whole text, without anybody's generate()."""
    import torch

    model, ids = random_model(**shape), list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + NEW and ids[-1] != STOP:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def peer(program: str, **settings: Any) -> closing[Worker]:
    return closing(Worker(program, ["-m", f"omnidraft.tools.peers.{program}"], {"threads": 1, **settings}))


@pytest.mark.parametrize("assisted", [False, True])
def test_transformers_says_what_its_checkpoint_says(checkpoint: Path, prompt: list[int], assisted: bool) -> None:
    """The shipped drafter has another vocabulary, and guesses wrong: the text is that of the target all the same."""
    drafter = str(registry.locate("default")) if assisted else None
    with peer("run_transformers", target=str(checkpoint), drafter=drafter, stop_ids=[STOP]) as worker:
        answers = [worker.ask(Request(prompt, NEW, GREEDY)) for _ in range(2)]
        other = worker.ask(Request(prompt[::-1], NEW, GREEDY))
    assert set(worker.facts) == {"transformers", "torch"}
    for answer in answers:
        assert answer.tokens == greedy(prompt) != other.tokens
        assert answer.passes + answer.accepted == len(answer.tokens)
        assert 0 < answer.first_seconds < answer.seconds
        assert (answer.proposed > 0) is assisted


def test_transformers_draws_with_the_seed(checkpoint: Path, prompt: list[int]) -> None:
    def drawn(seed: int) -> Request:
        return Request(prompt, NEW, vars(Sampling(1.0, top_p=0.9, seed=seed)))

    with peer("run_transformers", target=str(checkpoint), drafter=None, stop_ids=[STOP]) as worker:
        first, again, other = (worker.ask(drawn(seed)).tokens for seed in (1, 1, 2))
    assert first == again != other


def test_llama_cpp_says_what_its_file_says(tmp_path: Path, prompt: list[int]) -> None:
    pytest.importorskip("xllamacpp")
    square = {"head_dim": 16}  # the only shape of heads that the small file describes
    file = write_gguf(tmp_path / "model.gguf", random_model(**square))
    with peer("run_llama_cpp", model=str(file), context=256) as worker:
        answers = [worker.ask(Request(prompt, NEW, GREEDY)) for _ in range(2)]
    assert [answer.tokens for answer in answers] == [greedy(prompt, **square)] * 2
    assert 0 < answers[0].first_seconds < answers[0].seconds


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("Q8_0", 0.01)])
def test_a_gguf_file_in_another_type_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: float
) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    monkeypatch.setattr("omnidraft.export.cache.cache_root", lambda: tmp_path / "cache")
    file = write_gguf(tmp_path / "model.gguf", random_model())
    made = converted(file, kind)
    assert type_of(made) == kind
    before, after = GGUFReader(file), GGUFReader(made)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.file_type"}
    assert set(before.fields) - own == set(after.fields) - own
    assert all(before.fields[n].contents() == after.fields[n].contents() for n in set(before.fields) - own)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name
        a, b = dequantize(old.data, old.tensor_type), dequantize(new.data, new.tensor_type)
        assert np.abs(a - b).max() <= error * np.abs(a).max()


def test_what_goes_wrong_is_one_line_and_errors_leave_the_process_alive(checkpoint: Path, prompt: list[int]) -> None:
    with peer("run_transformers", target=str(checkpoint), drafter=None, stop_ids=[STOP]) as worker:
        with pytest.raises(OmniDraftError, match="run_transformers: "):
            worker.ask(Request(prompt, NEW, {**GREEDY, "temperature": "warm"}))
        assert worker.ask(Request(prompt, NEW, GREEDY)).tokens == greedy(prompt)
    with pytest.raises(OmniDraftError, match=r"stopped with status 1 \(ModuleNotFoundError: .*no_such_module"):
        Worker("x", ["-c", "import no_such_module"], {"threads": 1})
    with pytest.raises(OmniDraftError, match=r"no answer for 0\.2 s"):
        Worker("x", ["-c", "input(); input()"], {"threads": 1}, seconds=0.2)
    with pytest.raises(OmniDraftError, match="run_transformers: "):
        Worker("run_transformers", ["-m", "omnidraft.tools.peers.run_transformers"], {"threads": 1})


def test_names_are_checked_and_a_missing_package_has_its_line() -> None:
    assert against.read_against("onnxruntime, genai") == ["genai"]
    with pytest.raises(OmniDraftError, match="choose from onnxruntime, genai"):
        against.read_against("genai,vllm")
    with pytest.raises(OmniDraftError, match="no_such_module is not installed; pip install -c constraints"):
        against._need("no_such_module", "thing")


@pytest.fixture(scope="module")
def opened(loaded: dict[str, Loaded]) -> Iterator[dict[str, against.Opened]]:
    """genai and transformers on the default pair."""
    names = {"int8": ["genai"], "int4": ["genai"], "fp32": ["genai", "transformers"]}
    found = {
        precision: against.open_peers(names[precision], loaded[precision].engine("off"), Sampling(), [[1, 2]], NEW)
        for precision in PRECISIONS
    }
    yield found
    for peers in found.values():
        peers.close()


@pytest.mark.model
@pytest.mark.parametrize("precision", PRECISIONS)
def test_genai_says_what_one_row_plain_decoding_says(
    loaded: dict[str, Loaded], opened: dict[str, against.Opened], prompts: list[str], precision: str
) -> None:
    plain, rival = loaded[precision].engine("off", lossless="near"), opened[precision].peers["onnxruntime-genai"]
    for text in prompts[:3]:
        expected = plain.generate(text, sampling=Sampling(), max_new_tokens=NEW)
        got = rival.generate(text, sampling=Sampling(), max_new_tokens=NEW, stop=(), raw=False)
        assert got.tokens == expected.tokens
        assert got.completion_tokens == expected.completion_tokens and got.tokens_per_second


@pytest.mark.model
def test_transformers_says_what_fp32_plain_decoding_says(
    loaded: dict[str, Loaded], opened: dict[str, against.Opened], prompts: list[str]
) -> None:
    plain, rival = loaded["fp32"].engine("off"), opened["fp32"].peers["transformers, fp32"]
    for text in prompts[:2]:
        expected = plain.generate(text, sampling=Sampling(), max_new_tokens=NEW)
        got = rival.generate(text, sampling=Sampling(), max_new_tokens=NEW, stop=(), raw=False)
        assert got.tokens == expected.tokens


@pytest.mark.model
def test_a_peer_that_cannot_take_part_says_why(bundle: Path) -> None:
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options

    engine = Engine.open(bundle, target="qwen3", options=Options("off"))
    found = against.open_peers(["llama.cpp", "genai"], engine, Sampling(0.7, min_p=0.1), [[1, 2]], NEW)
    assert not found.peers
    assert "xllamacpp is not installed" in found.absent["llama.cpp"] or "no .gguf file" in found.absent["llama.cpp"]
    assert "min-p" in found.absent["genai"]
