"""The step graph: gradients against torch's and finite differences, AdamW against torch's, what a step leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning import VARIANTS, random_batch, random_lora, torch_gradient, write_graphs

from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.trainer import Snapshot
from omnidraft.export.training_graph import STEP

torch = pytest.importorskip("torch")


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_torchs(overrides: dict[str, Any], rank: int, tmp_path: Path) -> None:
    model, layout = write_graphs(tmp_path, **overrides)
    batch, lora = random_batch(model.config.vocab_size), random_lora(layout, rank)
    trainer = OnnxStepTrainer(tmp_path / STEP, layout, rank)
    trainer.load(Snapshot(lora))
    loss, expected = torch_gradient(model, layout, lora, batch)
    found = layout.parameters(trainer.gradient(batch))
    for name, part in layout.parameters(expected.astype(np.float32)).items():
        assert relative(found[name], part) <= 1e-4, name
    assert trainer.step(batch, 0.0) == pytest.approx(loss, rel=1e-5)
