"""One bundle at fp32, its greedy text wherever it can be decoded here: plain on the CPU, drafted everywhere else.

The table of docs/devices.md has a line for each; pytest -s prints them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simulator
from one_bundle import PROMPTS, TOKENS
from test_arm64 import arm64_python, runner
from test_pack import pack, unpack
from test_web import NODE, node_modules, unpacked_page, visit

from omnidraft.runtime.decoder import prefill
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.invariance import CHUNK
from omnidraft.runtime.options import Options
from omnidraft.runtime.placed import CPU
from omnidraft.runtime.placement import read_wishes
from omnidraft.runtime.sampling import Sampling

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the table is that of an x86-64 machine"),
]
PROGRAM = Path(__file__).parent / "one_bundle.py"
TABLE = Path(__file__).parent.parent / "docs/devices.md"
QNN = "QNNExecutionProvider"
DRAFT = "3"


@dataclass(frozen=True)
class Row:
    """A place where the bundle is decoded: its words in the table, the promise there, and how to get its answers."""

    where: str
    graphs: str
    promise: str
    provider: str
    answers: Callable[[Path, Path, Path], dict[str, Any]]  # of the bundle, in an empty folder, with QNN's packages


def here(ep: str, profile: str) -> Callable[[Path, Path, Path], dict[str, Any]]:
    def answers(bundle: Path, folder: Path, packages: Path) -> dict[str, Any]:
        done = simulator.beside(packages, PROGRAM, bundle, ep, profile, DRAFT)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return answers


def on_arm64(profile: str) -> Callable[[Path, Path, Path], dict[str, Any]]:
    def answers(bundle: Path, folder: Path, packages: Path) -> dict[str, Any]:
        python = arm64_python()
        pack(bundle, "--for", "linux-arm64", "--out", folder / "p.tar.gz")
        run = runner(python, unpack(folder / "p.tar.gz", folder / "unpacked"))
        return dict(json.loads(run(PROGRAM, "bundle", "cpu", profile, DRAFT).stdout))

    return answers


def in_a_browser(bundle: Path, folder: Path, packages: Path) -> dict[str, Any]:
    if NODE is None:
        pytest.skip("node is not installed")
    page = unpacked_page(bundle, node_modules(), folder)
    asked = {"budget": str(TOKENS), "temperature": "0", "draft": DRAFT}
    found = visit(page, [{**asked, "prompt": prompt} for prompt in PROMPTS])
    said = found["answers"]
    assert found["errors"] == [] and len(said) == len(PROMPTS) and all("exact" in answer["state"] for answer in said)
    return {
        "tokens": [answer["tokens"] for answer in said],
        "accepted": sum(int(answer["counts"]["accepted"]) for answer in said),
        "promise": "exact",
        "providers": {"target": "wasm"},
    }


def on_the_simulator(bundle: Path, folder: Path, packages: Path) -> dict[str, Any]:
    if not simulator.HERE:
        pytest.skip(simulator.REASON)
    return here("target=qnn,drafter=cpu", "auto")(bundle, folder, packages)


ROWS = {
    "cpu": Row("x86-64", "`cpu`", "exact", CPU, here("cpu", "cpu")),
    "static": Row("x86-64", "`static`", "exact", CPU, here("cpu", "static")),
    "arm64-cpu": Row("ARM64 (qemu)", "`cpu`", "near", CPU, on_arm64("cpu")),
    "arm64-static": Row("ARM64 (qemu)", "`static`", "exact", CPU, on_arm64("static")),
    "browser": Row("browser (WebAssembly)", "`cpu`", "exact", "wasm", in_a_browser),
    "simulator": Row("QNN's HTP simulator", "`qnn:simulator`, fp16", "exact", QNN, on_the_simulator),
}


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """QNN's, or none where it has no simulator."""
    if not simulator.HERE:
        return tmp_path_factory.mktemp("none")
    found: Path = request.getfixturevalue("qnn")
    return found


@pytest.fixture(scope="module")
def one(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, by the command of docs/devices.md; what QNN compiles is that of test_qnn_bundle.py."""
    out = tmp_path_factory.mktemp("one") / "bundle"
    profiles = "cpu,static,qnn:simulator" if simulator.HERE else "cpu,static"
    models = ("--drafter", "default", "--target", "qwen3=qwen3-10m", "--drafter-precision", "fp32")
    options = ("--precision", "fp32", "--profile", profiles, "--context", "160", "--out", out)
    simulator.beside(packages, "-m", "omnidraft.tools.cli", "export", *models, *options)
    return out


@pytest.fixture(scope="module")
def plain(one: Path) -> list[list[int]]:
    """Tokens of plain decoding on the dynamic graph on the CPU, which all others are held against."""
    engine = Engine.open(one, options=Options("off"), threads=1, wishes=read_wishes("cpu", profile="cpu"))
    found = [engine.generate(prompt, max_new_tokens=TOKENS, sampling=Sampling()).tokens for prompt in PROMPTS]
    assert all(len(set(tokens)) > 10 for tokens in found), "answers that say something"
    return found


def margin(bundle: Path, prompt: str, expected: list[int], found: list[int]) -> tuple[int, float] | None:
    """The first token that differs, and by how much the CPU's logit of its own choice there exceeds the other's."""
    at = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return None
    engine = Engine.open(bundle, options=Options("off"), threads=1, wishes=read_wishes("cpu", profile="cpu"))
    decoder, (ids, *_) = engine.pair.target.decoder, engine.encode(prompt, TOKENS)
    decoder.reserve(len(ids) + TOKENS)
    logits = prefill(decoder, [*ids, *expected[:at]], CHUNK, 2)
    return at, float(logits[expected[at]] - logits[found[at]])


@pytest.mark.parametrize("name", ROWS)
def test_the_text_is_that_of_plain_decoding_on_the_cpu(
    name: str, one: Path, packages: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    """Equal wherever sums are fp32's. The HTP's are fp16's: where its text leaves, that was close to the CPU's."""
    row = ROWS[name]
    found = row.answers(one, tmp_path, packages)
    assert (found["promise"], found["providers"]["target"]) == (row.promise, row.provider)
    assert found["accepted"] > 30, "drafted"
    margins = [margin(one, *texts) for texts in zip(PROMPTS, plain, found["tokens"], strict=True)]
    first = next(((i, *where) for i, where in enumerate(margins, start=1) if where), None)
    line = _line(name, row, sum(map(len, plain)), first)
    print(f"\n{line}")
    assert first is None or (row.provider == QNN and first[2] < 0.1)
    assert line in TABLE.read_text(encoding="utf-8").splitlines()


def test_a_margin_is_found_where_texts_differ(one: Path, plain: list[list[int]]) -> None:
    """The control: of another token, and of the same."""
    other = [*plain[0][:5], plain[0][5] + 1, *plain[0][6:]]
    where = margin(one, PROMPTS[0], plain[0], other)
    assert where is not None and where[0] == 5 and where[1] > 0
    assert margin(one, PROMPTS[0], plain[0], plain[0]) is None


def _line(name: str, row: Row, tokens: int, first: tuple[int, int, float] | None) -> str:
    """A row of the table. `first`: the answer whose text leaves the CPU's, the place of the token, and the margin."""
    same, margin = f"all {tokens} tokens", "none"
    if first is not None:
        same, margin = f"up to token {first[1] + 1} of answer {first[0]}", f"{first[2]:.3f}"
    command = f"pytest -s test_one_bundle.py -k '[{name}]'"
    return f"| {row.where} | {row.graphs} | {same} | {margin} | {row.promise} | `{command}` |"
