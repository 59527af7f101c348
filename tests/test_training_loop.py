"""Training itself: batches of a step, the schedule, and a killed run that ends with the weights of one that was not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import random_model, write_checkpoint
from safetensors.torch import load_file

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.vocabulary import build_map
from omnidraft.tools.training import loop
from omnidraft.tools.training.dataset import Batches, Dataset
from omnidraft.tools.training.loop import Plan, Trainer, cooldown, scale
from omnidraft.tools.training.model import build_model, parse_shape
from omnidraft.tools.training.target import open_target

PLAN = Plan(steps=20, batch=2, length=16, rate=1e-3, distill=0.5, patience=3, seed=5)


class Quiet:
    """A Log that says nothing, and can fail at a step."""

    def __init__(self, fail_at: int = -1) -> None:
        self.steps, self.fail_at = 0, fail_at
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def stage(self, what: str, total: int) -> None: ...

    def advance(self, steps: int, what: str) -> None:
        self.steps += steps
        if self.steps == self.fail_at:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "draw_curve", lambda history, path: None)


@pytest.fixture
def data() -> Dataset:
    """Documents of 20 to 60 tokens, half of which have soft labels."""
    rng = np.random.default_rng(0)
    begins = np.cumsum([0, *rng.integers(20, 60, 12)])
    ids = rng.integers(0, 384, begins[-1]).astype(np.int32)
    soft = np.where(rng.random(begins[-1]) < 0.5, np.arange(begins[-1]) // 2, -1).astype(np.int32)
    rows = begins[-1] // 2 + 1
    p = rng.dirichlet(np.ones(4), rows).astype(np.float16)
    return Dataset(ids, begins, rng.integers(1, 3, 12), soft, rng.integers(0, 384, (rows, 4)).astype(np.int32), p)


def trainer(data: Dataset, out: Path, log: Any, plan: Plan = PLAN, rates: list[float] | None = None) -> Trainer:
    """A Trainer whose validations give `rates` in turn, or ever better ones."""
    out.mkdir(exist_ok=True)

    def validate(_: Any) -> dict[str, dict[str, float]]:
        done = len(made.progress.history)
        return {"task": {"k1": rates[done] if rates else done / 100, "k4": 0.0, "positions": 0.0}}

    made = Trainer(random_model(num_hidden_layers=1), data, validate, plan, out, "cpu", log)
    return made


def test_a_batch_depends_on_its_step_only(data: Dataset) -> None:
    forward, scattered = Batches(data, 2, 16, 7), Batches(data, 2, 16, 7)
    steps = list(range(3 * forward.an_epoch))
    seen = {step: forward.at(step) for step in steps}
    for step in np.random.default_rng(1).permutation(steps).tolist():
        assert all(np.array_equal(a, b) for a, b in zip(seen[step], scattered.at(step), strict=True))
    epochs = [np.concatenate([seen[s][0] for s in steps[i : i + forward.an_epoch]]) for i in (0, forward.an_epoch)]
    assert not np.array_equal(*epochs), "every epoch is shuffled anew"
    assert not np.array_equal(Batches(data, 2, 16, 8).at(0)[0], seen[0][0])


def test_a_text_shorter_than_a_batch_is_repeated(data: Dataset) -> None:
    assert Batches(data, 64, 64, 0).at(3)[0].shape == (64, 64)


@pytest.mark.parametrize("kill", [1, 7, 13])
def test_a_resumed_run_ends_with_the_same_weights(
    kill: int, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "VALIDATIONS", 4)
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0)
    whole = trainer(data, tmp_path / "whole", Quiet())
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        trainer(data, tmp_path / "killed", Quiet(kill)).run()
    log = Quiet()
    resumed = trainer(data, tmp_path / "killed", log)
    assert any("resumed" in line for line in log.lines) == (kill > 1)
    resumed.run()
    weights, again = whole._model.state_dict(), resumed._model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = trainer(data, tmp_path / "other", Quiet(), replace(PLAN, seed=6))
    other.run()
    assert not all(torch.equal(weights[n], w) for n, w in other._model.state_dict().items()), "the check is vacuous"
    stored = [load_file(tmp_path / run / "model.safetensors") for run in ("whole", "killed")]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert steps == [5, 10, 15, 20]


def test_training_lowers_the_loss(data: Dataset, tmp_path: Path) -> None:
    run = trainer(data, tmp_path / "out", Quiet(), replace(PLAN, steps=40))
    run.run()
    losses = [record["loss"] for record in run.progress.history]
    assert losses[-1] < 0.9 * losses[0]


def test_a_plateau_begins_the_cooldown_and_the_best_weights_stay(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "VALIDATIONS", 100)
    plan = replace(PLAN, steps=100)
    out = tmp_path / "out"
    run = trainer(data, out, Quiet(), plan, [0.1, 0.3, 0.2] + [0.25] * 200)
    run.run()
    assert run.progress.plateau == 5, "three validations without a gain over the one of step 2"
    assert run.progress.step == 5 + 30 < 100
    assert run.progress.history[run.progress.best()]["step"] == 2
    assert not torch.equal(
        load_file(out / "model.safetensors")["model.norm.weight"], run._model.model.norm.weight.half()
    )


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    plan = replace(PLAN, steps=1000)
    shares = [scale(plan, step, None) for step in range(1000)]
    assert cooldown(plan, None) == (700, 1000) and cooldown(plan, 200) == (200, 500)
    assert shares[0] == 1 / 50 and shares[50:701] == [1.0] * 651
    assert all(a > b for a, b in pairwise(shares[700:])) and 0 < shares[-1] < 0.01
    assert scale(plan, 499, 200) == shares[-1]


def test_a_checkpoint_of_another_shape_is_refused(data: Dataset, tmp_path: Path) -> None:
    trainer(data, tmp_path / "out", Quiet(), replace(PLAN, steps=1)).run()
    with pytest.raises(OmniDraftError, match=r"checkpoint\.pt: does not fit .*--shape"):
        Trainer(random_model(hidden_size=128), data, lambda m: {}, PLAN, tmp_path / "out", "cpu", Quiet())
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(OmniDraftError, match="does not fit"):
        trainer(data, tmp_path / "out", Quiet())


def test_a_copied_drafter_with_the_targets_own_vocabulary_is_the_target(tmp_path: Path) -> None:
    """All layers copied and every token direct: the same logits. One layer less: others."""
    target = open_target(str(write_checkpoint(tmp_path / "t", num_hidden_layers=3)))
    same = build_map(target.tokens, target.tokens)
    ids = torch.arange(10, 40)[None]
    wanted = random_model(num_hidden_layers=3)(ids).logits
    size = target.tokens.size
    assert torch.allclose(
        build_model(parse_shape("target:0,1,2"), size, 64, target, same)(ids).logits, wanted, atol=1e-4
    )
    fewer = build_model(parse_shape("target:0,2"), size, 64, target, same)
    assert fewer.config.num_hidden_layers == 2 and not torch.allclose(fewer(ids).logits, wanted, atol=1e-2)


def test_shapes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for text in ("256", "100x2", "256x0", "target:", "target:a"):
        with pytest.raises(OmniDraftError, match="--shape"):
            parse_shape(text)
    target = open_target(str(write_checkpoint(tmp_path / "t")))
    same = build_map(target.tokens, target.tokens)
    with pytest.raises(OmniDraftError, match="layers 0 to 1, not 5"):
        build_model(parse_shape("target:0,5"), 384, 64, target, same)
    other = open_target(str(write_checkpoint(tmp_path / "q", "qwen3")))
    with pytest.raises(OmniDraftError, match="cannot be copied from"):
        build_model(parse_shape("target:0"), 384, 64, other, same)
