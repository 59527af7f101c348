"""The page: its modules against the golden vectors, and the whole of it in a browser against the engine.

The browser decodes with fp32 graphs: int8 kernels (accuracy level 4) of WASM and x86 round differently, so their
tokens may differ where two are about equally likely; fp32 logits agree to about 1e-5.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.report import Report
from omnidraft.runtime.sampling import Sampling, draw
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.translation import Mode
from omnidraft.runtime.vocabulary import build_map
from omnidraft.tools.cli import app

HERE = Path(__file__).parent
ROOT, DRIVERS, GOLDEN = HERE.parent, HERE / "web", HERE / "golden"
MODULES = DRIVERS / "node_modules"
NODE = shutil.which("node")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("OMNIDRAFT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"


def node(script: str, *arguments: str | Path, given: Any = "") -> Any:
    """What a driver prints, as JSON."""
    assert NODE is not None
    text = given if isinstance(given, str) else json.dumps(given)
    command = [NODE, str(DRIVERS / script), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def modules() -> Path:
    """The npm packages of the page."""
    return node_modules()


def node_modules() -> Path:
    """The npm packages of tests/web/package.json, installed there once; skips where they cannot be."""
    if not (MODULES / "playwright-core").is_dir():
        npm = shutil.which("npm")
        if npm is None or NODE is None:
            pytest.skip("npm is not installed")
        quiet = ("--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--silent")
        done = subprocess.run([npm, "install", "--prefix", DRIVERS, *quiet], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install the page's packages: {done.stderr.strip().splitlines()[-1:]}")
    return MODULES


@needs_node
def test_noise_is_that_of_the_golden_file() -> None:
    """Up to the last bit of a logarithm, which no standard fixes."""
    text = (GOLDEN / "noise.json").read_text()
    golden = [case["gumbel"] for case in json.loads(text)["cases"]]
    np.testing.assert_allclose(node("golden.mjs", "noise", given=text), golden, rtol=1e-13)
    other = text.replace('"seed": 42', '"seed": 43')
    assert not np.allclose(node("golden.mjs", "noise", given=other), golden)


@needs_node
def test_rounds_are_those_of_the_golden_file() -> None:
    text = (GOLDEN / "rounds.json").read_text()
    golden = json.loads(text)["cases"]
    made = node("golden.mjs", "rounds", given=text)
    assert made == [{name: case[name] for name in ("proposals", "tokens", "accepted")} for case in golden]


@needs_node
def test_draws_are_those_of_the_runtime() -> None:
    """Whole vocabularies, where the page rules out most of the noise unseen; truncations, penalty, ties."""
    samplings = [
        Sampling(),
        Sampling(repetition_penalty=1.5),
        Sampling(1.0, seed=1),
        Sampling(0.7, seed=2**64 - 1, repetition_penalty=0.8),
        Sampling(30.0, seed=5),
        Sampling(0.7, top_k=20, seed=6),
        Sampling(1.1, top_p=0.9, seed=7),
        Sampling(1.3, top_k=400, top_p=0.99, min_p=0.02, seed=8),
    ]
    rng = np.random.default_rng(0)
    cases, expected = [], []
    for number in range(80):
        logits = rng.normal(size=(3, 50, 2000)[number % 3]) * (1 + number % 7)
        logits = np.round(logits, number % 4).astype(np.float32)  # few decimals: ties
        history, sampling = [number % 3, 1, 1], samplings[number % len(samplings)]
        cases.append(
            {"logits": logits.tolist(), "history": history, "sampling": _as_texts(sampling), "position": number}
        )
        expected.append(draw(logits, history, sampling, number))
    assert len(set(expected)) > 20
    assert node("draws.mjs", given=cases) == expected


def _as_texts(sampling: Sampling) -> dict[str, Any]:
    return {**asdict(sampling), "seed": str(sampling.seed)}


def texts() -> list[bytes]:
    """Text of many kinds, cut anywhere, so that characters come in halves."""
    rng = random.Random(1)
    lines = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    whole = " ".join(lines[:12]) + " naïve 漢字かな 😀👩‍👩‍👧 Привет\n\n\tdef f(x):\r\n    return 12345\u3000▁<|im_end|>"
    data = whole.encode() + b"\xff\xfe\x00\x80"
    cuts = [sorted(rng.sample(range(len(data) + 1), 2)) for _ in range(150)]
    tail = [sorted(rng.sample(range(len(data) - 120, len(data) + 1), 2)) for _ in range(150)]
    return [b"", *(data[a : min(b, a + 200)] for a, b in [*cuts, *tail])]


@needs_node
@pytest.mark.slow
def test_tokenizers_spell_as_those_of_the_runtime(modules: Path) -> None:
    files = [GOLDEN / f"{name}.tokenizer.json" for name in ("byte_level", "byte_level_digits", "byte_fallback")]
    files += [ROOT / "models" / name / "tokenizer.json" for name in ("default_drafter", "qwen3_10m")]
    samples = texts()
    library = modules / "@huggingface/tokenizers/dist/tokenizers.min.mjs"
    made = node("spell.mjs", library, given=[[str(file), [text.hex() for text in samples]] for file in files])
    for file, spelled in zip(files, made, strict=True):
        tokens = TokenBytes.from_file(file)
        for text, ids in zip(samples, spelled, strict=True):
            assert ids == tokens.encode(text), (file.parent.name, text)


@needs_node
@pytest.mark.slow
def test_translations_are_those_of_the_golden_file(modules: Path) -> None:
    cases = json.loads((GOLDEN / "translations.json").read_text(encoding="utf-8"))
    library = modules / "@huggingface/tokenizers/dist/tokenizers.min.mjs"
    for side in ("draft", "target"):
        by_name = {case[side]: [c for c in cases if c[side] == case[side]] for case in cases}
        given = [[str(GOLDEN / f"{name}.tokenizer.json"), [c["bytes"] for c in own]] for name, own in by_name.items()]
        assert node("spell.mjs", library, given=given) == [[c[f"{side}_ids"] for c in own] for own in by_name.values()]
    pairs = {(case["draft"], case["target"]) for case in cases}
    tokens = {name: TokenBytes.from_file(GOLDEN / f"{name}.tokenizer.json") for pair in pairs for name in pair}
    maps = {(draft, target): asdict(build_map(tokens[draft], tokens[target])) for draft, target in pairs}
    made = node("translate.mjs", given=[{"map": maps[c["draft"], c["target"]], "ids": c["draft_ids"]} for c in cases])
    assert made == [{"kinds": case["draft_kinds"], "pieces": case["pieces"]} for case in cases]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter and the second target at fp32: real tokenizers, merges and splits, and quick in a browser."""
    from omnidraft.export.pipeline import Order, export

    class Quiet:
        def plan(self, steps: int) -> None: ...
        def step(self, what: str) -> None: ...
        def note(self, text: str) -> None: ...

    out = tmp_path_factory.mktemp("small") / "bundle"
    export(Order("default", {"qwen3": "qwen3-10m"}, out, ("fp32",), "fp32"), Quiet())
    return out


@pytest.fixture(scope="module")
def page(small: Path, modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The web package of it, unpacked."""
    return unpacked_page(small, modules, tmp_path_factory.mktemp("page"))


def unpacked_page(bundle: Path, modules: Path, folder: Path) -> Path:
    """The web package of a bundle's first target, with the npm packages, unpacked into a folder."""
    archive = folder / "web.tar.gz"
    command = ["pack", str(bundle), "--for", "web", "--out", str(archive), "--node-modules", str(modules)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    with tarfile.open(archive) as packed:
        packed.extractall(folder)  # our own archive; filters are younger than Python 3.11.0
    return folder / "omnidraft-web"


class Quietly(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


class Isolated(Quietly):
    """With the headers that allow threads."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


def serving(folder: Path, handler: type[Quietly] = Quietly) -> Iterator[str]:
    """The address of a server of a folder, on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def visit(folder: Path, jobs: list[dict[str, str]], handler: type[Quietly] = Quietly) -> dict[str, Any]:
    """What the page in a folder does with jobs (see browser.mjs)."""
    if CHROMIUM is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and OMNIDRAFT_CHROMIUM names none")
    for address in serving(folder, handler):
        found = node("browser.mjs", CHROMIUM, address, given=jobs)
        assert all(request.startswith((address, "data:")) for request in found["requests"]), found["requests"]
        return dict(found)
    raise AssertionError


def engine_says(small: Path, sampling: Sampling, draft: str) -> Report:
    engine = Engine.open(small, options=Options(draft, mode=Mode.STATIC))
    return engine.generate(PROMPT, sampling=sampling, max_new_tokens=48)


@pytest.mark.slow
def test_the_page_says_what_the_engine_says(small: Path, page: Path) -> None:
    """Greedy and sampled, drafted and plain: the same tokens, and where they were drafted the same proposals."""
    asked = {"prompt": PROMPT, "budget": "48"}
    greedy, sampled = {**asked, "temperature": "0"}, {**asked, "temperature": "0.7", "seed": "7"}
    jobs = [{**greedy, "draft": "3"}, {**greedy, "draft": "0"}, {**sampled, "draft": "3"}, {**sampled, "draft": "0"}]
    found = visit(page, jobs)
    assert found["errors"] == [] and found["start"]["phase"] == "ready", found
    assert any(request.endswith(".wasm") for request in found["requests"])
    for number, sampling in ((0, Sampling()), (2, Sampling(0.7, seed=7))):
        drafted, plain = found["answers"][number : number + 2]
        report = engine_says(small, sampling, "3")
        assert drafted["tokens"] == plain["tokens"] == report.tokens
        assert drafted["text"] == report.text
        assert "exact" in drafted["state"] and "tokens/s" in drafted["state"]
        assert plain["counts"]["proposed"] == "0" and not any(plain["drafted"])
        assert sum(drafted["drafted"]) == int(drafted["counts"]["accepted"]) == report.counts["accepted"] > 0
        assert int(drafted["counts"]["proposed"]) == report.counts["proposed"]
        assert int(drafted["counts"]["merges"]) == report.counts["merges"]
        assert int(drafted["counts"]["passes"]) == report.counts["passes"] < len(report.tokens)
    assert found["answers"][0]["tokens"] != found["answers"][2]["tokens"]


@pytest.mark.slow
def test_an_isolated_page_runs_on_threads_and_refuses_in_one_line(small: Path, page: Path) -> None:
    bad = [{"prompt": "  "}, {"prompt": PROMPT, "temperature": "-1"}, {"temperature": "0", "budget": "9999"}]
    found = visit(page, [*bad, {"budget": "8"}], Isolated)
    said = [answer["state"] for answer in found["answers"]]
    assert ["the prompt is empty" in said[0], "temperature" in said[1], "at most" in said[2]] == [True] * 3, said
    assert f"{min(4, os.cpu_count() or 1)} threads" in found["start"]["state"]
    assert found["answers"][3]["tokens"] == engine_says(small, Sampling(), "3").tokens[:8]


def changed(page: Path, file: str, folder: Path) -> Path:
    """A copy of the page in which a file has one byte changed."""
    copy = Path(shutil.copytree(page, folder, copy_function=os.link))
    data = (copy / file).read_bytes()
    (copy / file).unlink()
    (copy / file).write_bytes(data.replace(b"[", b" ", 1))
    return copy


@pytest.mark.slow
def test_the_page_names_what_is_damaged_or_missing(page: Path, tmp_path: Path) -> None:
    name = "targets/qwen3/vocabulary.json"
    found = visit(changed(page, f"bundle/{name}", tmp_path / "copy"), [])
    line = f"{name}: changed since export (SHA-256 differs); unpack again"
    assert found["start"] == {"phase": "failed", "state": line}
    shutil.rmtree(tmp_path / "copy/node_modules")
    found = visit(tmp_path / "copy", [])
    assert found["start"]["phase"] == "failed"
    assert "run the npm line of README.md" in found["start"]["state"]
