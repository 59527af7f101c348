"""Fixtures shared by the tests: the default pair, exported for real at every precision."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omnidraft.adapters.layout import Layout
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.state import State

if TYPE_CHECKING:
    from registry import Models

ROOT = Path(__file__).parent.parent
PRECISIONS = ("int8", "int4", "fp32")
TARGETS = {"smollm2": "smollm2", "qwen3": "qwen3-10m"}
NOWHERE = State(None, lambda line: None)

# A shell in the background has it ignored, and so would every program that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    lines = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The shipped drafter with two targets at three precisions; quick once the conversions are cached."""
    from omnidraft.export.pipeline import Order, export

    class Quiet:
        def plan(self, steps: int) -> None: ...
        def step(self, what: str) -> None: ...
        def note(self, text: str) -> None: ...

    out = ROOT / "bundles" / "test"
    export(Order("default", TARGETS, out, PRECISIONS, "int8", threads=2), Quiet())
    return out


@dataclass
class Loaded:
    """A pair of the first target, what was measured of it here, and engines on it that keep nothing."""

    pair: Pair
    calibration: Calibration

    @property
    def w0(self) -> int | None:
        return self.calibration.w0

    def engine(self, draft: str = "2", state: State = NOWHERE, **options: str) -> Engine:
        return Engine(self.pair, Options(draft, **options), state, self.calibration)


@pytest.fixture(scope="session")
def loaded(bundle: Path) -> dict[str, Loaded]:
    pairs = {precision: load_pair(bundle, "smollm2", precision) for precision in PRECISIONS}
    return {precision: Loaded(pair, calibrate(pair, NOWHERE)) for precision, pair in pairs.items()}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """onnxruntime-training, installed as setup-training does (some ten seconds)."""
    from omnidraft.adapters.ort_training import VERSION
    from omnidraft.tools.setup_training import install

    folder = tmp_path_factory.mktemp("training") / "packages"
    assert install(folder)["onnxruntime"] == VERSION
    return folder


@pytest.fixture(scope="session")
def qnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """onnxruntime-qnn in a folder of its own (some ten seconds)."""
    from simulator import install

    return install(tmp_path_factory.mktemp("qnn") / "packages")


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout]:
    """Training graphs of a small drafter."""
    from learning import VOCABULARY, write_graphs

    folder = tmp_path_factory.mktemp("graphs")
    _, layout = write_graphs(folder, vocab_size=VOCABULARY)
    return folder, layout


@pytest.fixture(scope="session")
def toy_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A small drafter with a small target of each tokenizer family, random weights, exported (some ten seconds)."""
    from registry import make_models

    return make_models(tmp_path_factory.mktemp("toys"))
