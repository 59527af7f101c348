"""What stays in memory behind passes, steps of training and answers: nothing that grows with their number."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import pytest
from learning import RANK, RATE, needs_package, random_batch, worker, write_graphs
from registry import Models

from omnidraft.adapters import learner as learner_module
from omnidraft.adapters import onnx_step
from omnidraft.adapters.heap import give_back
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.learner import Learner
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.ort_training import OrtTrainingTrainer
from omnidraft.adapters.settings import Settings
from omnidraft.adapters.trainer import Trainer
from omnidraft.export.training_graph import LOSS, STEP
from omnidraft.runtime import decoder as decoder_module
from omnidraft.runtime.calibration import calibrate
from omnidraft.runtime.decoder import MOST_KEPT, Decoder
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import load_pair
from omnidraft.runtime.placement import session_options
from omnidraft.runtime.state import State

pytest.importorskip("torch")
KIB, MIB = 1 << 10, 1 << 20
MORE = 40  # passes or steps that are looked at
VOCABULARY = 2000


class _Mallinfo(ctypes.Structure):
    """mallinfo2 of malloc.h."""

    NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def in_use() -> int:
    """Bytes that the process has from malloc: what is resident less what is free, whatever the system counts."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, TypeError, AttributeError):
        pytest.skip("no glibc of 2.33 or newer")
    mallinfo.restype = _Mallinfo
    gc.collect()
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def growth(act: Callable[[int], object], measure: Callable[[], int] = in_use) -> int:
    """Bytes more behind MORE acts, numbered, than behind as many before them, which bring all to its size."""
    for number in range(MORE):
        act(number)
    before = measure()
    for number in range(MORE, 2 * MORE):
        act(number)
    return measure() - before


@pytest.fixture(scope="module")
def drafter(toy_models: Models) -> Path:
    return toy_models.bundle / "drafter" / "model.onnx"


def passes(decoder: Decoder) -> Callable[[int], object]:
    """An act of a pass: each of a shape of its own."""
    decoder.reserve(4 * MORE)
    return lambda number: (decoder.rollback(min(decoder.length, 2 * number)), decoder.run([1, 2, 3]))


def test_passes_of_new_shapes_leave_nothing(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with ONNX Runtime's memory patterns, which are a plan for each shape."""
    assert growth(passes(Decoder(drafter))) < 10 * KIB

    def planning(threads: int) -> ort.SessionOptions:
        options = session_options(threads)
        options.enable_mem_pattern = True
        return options

    monkeypatch.setattr(decoder_module, "session_options", planning)
    assert growth(passes(Decoder(drafter))) > 25 * KIB


def test_passes_of_all_widths_share_their_rows(drafter: Path) -> None:
    """And they give what they give in a decoder that ran no other width."""
    decoder = Decoder(drafter)
    decoder.reserve(256)
    ids = list(range(1, 2 * MOST_KEPT))
    for width in (*range(1, MOST_KEPT + 1), 3, 2 * MOST_KEPT - 1, 2, 9):
        decoder.rollback(0)
        logits, fresh = decoder.run(ids[:width]), Decoder(drafter)
        assert np.array_equal(logits, fresh.run(ids[:width]))
        assert decoder.hidden is not None and fresh.hidden is not None
        assert np.array_equal(decoder.hidden, fresh.hidden)
    assert set(decoder._widths) == set(range(1, MOST_KEPT + 1))
    for name, widest in decoder._rows.items():
        assert all(np.shares_memory(widest, made[name][0]) for made in decoder._widths.values())


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout]:
    """Training graphs of a drafter whose steps take enough to be seen in what is resident."""
    folder = tmp_path_factory.mktemp("larger")
    _, layout = write_graphs(folder, vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512)
    return folder, layout


def steps(trainer: Trainer, rows: int, length: int) -> Callable[[int], object]:
    """An act of a step: each on a batch of a shape of its own."""
    return lambda number: trainer.step(random_batch(VOCABULARY, rows, length + number, length + number), RATE)


def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ONNX Runtime's own settings for memory, in trainers."""

    class Options(ort.SessionOptions):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name not in ("enable_mem_pattern", "enable_cpu_mem_arena"):
                super().__setattr__(name, value)

    monkeypatch.setattr(onnx_step.ort, "SessionOptions", Options)


def test_steps_of_new_shapes_leave_nothing(larger: tuple[Path, Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with ONNX Runtime's own settings."""
    folder, layout = larger
    graph = folder / STEP
    assert growth(steps(OnnxStepTrainer(graph, layout, RANK), 2, 8)) < 500 * KIB
    by_default(monkeypatch)
    assert growth(steps(OnnxStepTrainer(graph, layout, RANK), 2, 8)) > 2 * MIB


def test_what_a_step_took_is_given_back(larger: tuple[Path, Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with ONNX Runtime's own settings, the largest batch is held for good."""
    folder, layout = larger
    graph = folder / STEP

    def held(trainer: OnnxStepTrainer) -> int:
        steps(trainer, 1, 8)(0)
        give_back()
        before = resident()
        steps(trainer, 8, 256)(0)
        give_back()
        return resident() - before

    assert held(OnnxStepTrainer(graph, layout, RANK)) < 8 * MIB
    by_default(monkeypatch)
    assert held(OnnxStepTrainer(graph, layout, RANK)) > 50 * MIB


@needs_package
def test_the_worker_gives_back_what_steps_took_when_it_saves(
    larger: tuple[Path, Layout], packages: Path, tmp_path: Path
) -> None:
    folder, layout = larger
    with closing(OrtTrainingTrainer(folder / LOSS, layout, RANK, packages, tmp_path)) as trainer:
        process = psutil.Process(worker(trainer).pid)
        steps(trainer, 1, 8)(0)
        trainer.snapshot()
        sizes = [process.memory_info().rss]
        steps(trainer, 8, 256)(0)
        sizes.append(process.memory_info().rss)
        trainer.snapshot()
        sizes.append(process.memory_info().rss)
    before, behind, saved = sizes
    assert behind - before > 50 * MIB, "control: between steps it keeps it"
    assert saved - before < 16 * MIB


def test_free_memory_is_given_back() -> None:
    """Pieces below what malloc asks the system for one by one, under a last one that stays."""
    pieces = [np.ones(100 * KIB, np.uint8) for _ in range(640)]
    last = pieces[-1]
    full = resident()
    del pieces
    gc.collect()
    assert full - resident() < 8 * MIB, "control: malloc gives it back by itself"
    give_back()
    assert full - resident() > 48 * MIB
    assert last[0] == 1


def test_answers_with_learning_leave_samples_and_nothing_else(
    toy_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are bounded by what they weigh; each round of learning gives back what it took."""
    given: list[int] = []
    monkeypatch.setattr(learner_module, "give_back", lambda: given.append(1))
    pair, state = load_pair(toy_models.bundle, threads=1), State(tmp_path, pytest.fail)
    engine = Engine(pair, Options("4"), state, calibrate(pair, state))
    settings = Settings(trainer="onnx-step", budget=100.0, interval=4, batch=4, rank=4)
    learner = Learner(engine, state, settings, pytest.fail)
    rounds: list[object] = []

    def answer(number: int) -> None:
        engine.generate(f"The boat came back {number % 4}", max_new_tokens=16 + number % 5)
        rounds.append(learner.after_response())

    def beyond_samples() -> int:
        memory = learner.memory
        return in_use() - sum(sample.nbytes for sample in [*memory.fresh, *memory.replay, *memory.anchors])

    with closing(learner):
        assert growth(answer, beyond_samples) < 200 * KIB
    assert sum(learned is not None for learned in rounds) == len(given) > 10
