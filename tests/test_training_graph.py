"""The step graph: gradients against torch's and finite differences, AdamW against torch's, what a step leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import SIZES
from learning import (
    RANK,
    RATE,
    VARIANTS,
    random_batch,
    random_lora,
    relative,
    scaled,
    torch_gradient,
    torch_steps,
    write_graphs,
)

from omnidraft.adapters.layout import Layout
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.trainer import CLIP, Snapshot
from omnidraft.export.training_graph import LOSS, STEP, WEIGHTS
from omnidraft.runtime.bundle import sha256

torch = pytest.importorskip("torch")
VOCABULARY = SIZES["vocab_size"]
Drafter = tuple[Path, Any, Layout]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: two threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """(folder, torch model, layout) of the first variant."""
    folder = tmp_path_factory.mktemp("graphs")
    return folder, *write_graphs(folder)


def trainer_at(folder: Path, layout: Layout, lora: np.ndarray) -> OnnxStepTrainer:
    trainer = OnnxStepTrainer(folder / STEP, layout, layout.rank(lora))
    trainer.load(Snapshot(lora))
    return trainer


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_torchs(overrides: dict[str, Any], rank: int, tmp_path: Path) -> None:
    model, layout = write_graphs(tmp_path, **overrides)
    batch, lora = random_batch(model.config.vocab_size), random_lora(layout, rank)
    trainer = trainer_at(tmp_path, layout, lora)
    loss, expected = torch_gradient(model, layout, lora, batch)
    found = layout.parameters(trainer.gradient(batch))
    for name, part in layout.parameters(expected.astype(np.float32)).items():
        assert relative(found[name], part) <= 1e-4, name
    assert trainer.step(batch, 0.0) == pytest.approx(loss, rel=1e-5)


def test_the_loss_changes_along_any_direction_as_the_gradient_says(drafter: Drafter) -> None:
    """Central differences of the graph's own loss, which is what the gradient must be of."""
    folder, _, layout = drafter
    lora, batch = random_lora(layout, RANK), random_batch(VOCABULARY)
    trainer = trainer_at(folder, layout, lora)
    gradient = trainer.gradient(batch).astype(np.float64)
    rng = np.random.default_rng(0)
    directions = [
        gradient,
        *rng.normal(size=(5, len(lora))),
        rng.normal(size=len(lora)) * (rng.random(len(lora)) < 0.1),
    ]
    for direction in directions:
        direction = direction / np.linalg.norm(direction)
        step = 0.02
        ends = []
        for sign in (1, -1):
            trainer.load(Snapshot((lora + sign * step * direction).astype(np.float32)))
            ends.append(trainer.step(batch, 0.0))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(gradient @ direction, rel=0.02, abs=2e-3 * np.linalg.norm(gradient))


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 40.0)], ids=["never clipped", "every other one clipped"])
def test_steps_are_those_of_torchs_adamw(drafter: Drafter, scales: tuple[float, ...]) -> None:
    folder, model, layout = drafter
    lora = random_lora(layout, RANK)
    work = [scaled(random_batch(VOCABULARY, seed=i % 3), scales[i % len(scales)] * 0.5) for i in range(10)]
    trainer = trainer_at(folder, layout, lora)
    norms = [float(np.linalg.norm(trainer.gradient(batch))) for batch in work]
    assert any(norm > CLIP for norm in norms) == (len(scales) > 1) and any(norm < CLIP for norm in norms)
    expected = torch_steps(model, layout, lora, work, RATE, CLIP)
    for batch, wanted in zip(work, expected, strict=True):
        trainer.step(batch, RATE)
        difference = np.abs(trainer.snapshot().lora - wanted)
        assert np.median(difference) <= 1e-3 * RATE and np.quantile(difference, 0.999) <= 0.1 * RATE
    other = torch_steps(model, layout, lora, work, RATE, 1e9)[-1]
    assert (np.median(np.abs(other - wanted)) > 0.1 * RATE) == (len(scales) > 1), "whether clipping changes anything"


def test_the_loss_falls_over_thirty_steps_on_one_batch(drafter: Drafter) -> None:
    folder, _, layout = drafter
    trainer, batch = trainer_at(folder, layout, layout.initial(RANK)), random_batch(VOCABULARY)
    losses = [trainer.step(batch, 3e-3) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(later < earlier for earlier, later in zip(losses[::5], losses[5::5], strict=False))


def test_steps_leave_the_weights_file_alone(drafter: Drafter) -> None:
    folder, _, layout = drafter
    before = sha256(folder / WEIGHTS)
    trainer = trainer_at(folder, layout, random_lora(layout, RANK))
    trainer.step(random_batch(VOCABULARY), 1.0)
    trainer.close()
    assert sha256(folder / WEIGHTS) == before


def test_a_gradient_is_no_step(drafter: Drafter) -> None:
    folder, _, layout = drafter
    trainer, batch = trainer_at(folder, layout, random_lora(layout, RANK)), random_batch(VOCABULARY)
    trainer.step(batch, RATE)
    before = trainer.snapshot()
    assert np.array_equal(trainer.gradient(batch), trainer.gradient(batch))
    after = trainer.snapshot()
    assert np.array_equal(before.lora, after.lora)
    assert (before.steps, before.optimizer) == (after.steps, after.optimizer)


@pytest.mark.parametrize("name", [LOSS, STEP])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_graphs_are_of_standard_operators_only(overrides: dict[str, Any], name: str, tmp_path: Path) -> None:
    write_graphs(tmp_path, **overrides)
    onnx.checker.check_model(str(tmp_path / name), full_check=True)
    model = onnx.load(tmp_path / name, load_external_data=False)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    assert not model.functions and {node.domain for node in model.graph.node} == {""}
    standard = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.since_version <= 17}
    assert {node.op_type for node in model.graph.node} <= standard
    assert all(tensor.data_location != onnx.TensorProto.EXTERNAL or _file(tensor) == WEIGHTS
               for tensor in model.graph.initializer)  # fmt: skip


def _file(tensor: onnx.TensorProto) -> str:
    return next(str(entry.value) for entry in tensor.external_data if entry.key == "location")


def test_one_graph_serves_every_rank(drafter: Drafter) -> None:
    """And a rank is what it says: columns of zeros beside it change neither loss nor the other columns' gradient."""
    folder, _, layout = drafter
    batch = random_batch(VOCABULARY)
    trainer = OnnxStepTrainer(folder / STEP, layout, 1)
    for rank in (1, 3, 16):
        lora = random_lora(layout, rank)
        wide = {
            name: np.pad(part, ((0, 0), (0, 2)) if name.endswith("A") else ((0, 2), (0, 0)))
            for name, part in layout.parameters(lora).items()
        }
        trainer.load(Snapshot(lora))
        gradient, loss = layout.parameters(trainer.gradient(batch)), trainer.step(batch, 0.0)
        trainer.load(Snapshot(layout.vector(wide)))
        wider = layout.parameters(trainer.gradient(batch))
        assert trainer.step(batch, 0.0) == pytest.approx(loss, rel=1e-5)
        for name, part in gradient.items():
            same = wider[name][:, :rank] if name.endswith("A") else wider[name][:rank]
            assert relative(same, part) <= 1e-4, name


def test_padding_behind_rows_changes_nothing(drafter: Drafter) -> None:
    folder, _, layout = drafter
    lora, batch, more = random_lora(layout, RANK), random_batch(VOCABULARY), 5
    rows, length = batch["input_ids"].shape
    row, column = np.divmod(batch["positions"], length)
    filler = np.random.default_rng(9).integers(0, VOCABULARY, (rows, more))
    padded = {
        **batch, "input_ids": np.concatenate([batch["input_ids"], filler], 1),
        "positions": row * (length + more) + column,
    }  # fmt: skip
    plain, other = (trainer_at(folder, layout, lora) for _ in range(2))
    assert relative(other.gradient(padded), plain.gradient(batch)) <= 1e-5
    assert other.step(padded, RATE) == pytest.approx(plain.step(batch, RATE), rel=1e-6)


def test_an_id_that_does_not_count_may_come_twice(drafter: Drafter) -> None:
    """Laws have a fixed width: what is left of it is filled with ids that are off, whichever they are."""
    folder, _, layout = drafter
    lora, batch = random_lora(layout, RANK), random_batch(VOCABULARY)
    filled = {
        **batch,
        "ids": np.concatenate([batch["ids"][:, :1], batch["ids"], batch["labels"]], 1),
        "logp": np.pad(batch["logp"], ((0, 0), (1, 1))),
        "on": np.pad(batch["on"], ((0, 0), (1, 1))),
    }
    plain, other = (trainer_at(folder, layout, lora) for _ in range(2))
    assert relative(other.gradient(filled), plain.gradient(batch)) <= 1e-5
    assert other.step(filled, RATE) == pytest.approx(plain.step(batch, RATE), rel=1e-6)
