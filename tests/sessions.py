"""What tests of whole learning sessions share: a learner on the default pair, in so few steps that tests can wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Loaded

from omnidraft.adapters.labels import batch, projected
from omnidraft.adapters.layout import Floats
from omnidraft.adapters.learner import Learner, Round
from omnidraft.adapters.samples import Sample
from omnidraft.adapters.settings import Settings
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.report import Report
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State

LENGTH = 24
QUICK: dict[str, Any] = {
    "loss": "projected", "rank": 4, "rate": 3e-3, "batch": 2, "interval": 2, "budget": 100.0, "trainer": "onnx-step",
}  # fmt: skip


@contextmanager
def learning(
    pair: Loaded, folder: Path, warn: Callable[[str], None] = pytest.fail, draft: str = "3", **settings: Any
) -> Iterator[Learner]:
    """A learner on an engine of its own, which leaves the shared drafter as shipped."""
    state = State(folder, warn)
    engine = pair.engine(draft, state)
    try:
        with closing(Learner(engine, state, Settings(**{**QUICK, **settings}), warn)) as learner:
            yield learner
    finally:
        engine.use_adapter(None)


def answer(
    learner: Learner, prompts: Sequence[str], sampling: Sampling | None = None
) -> list[tuple[Report, Round | None]]:
    """Answer prompts, learning between the answers."""
    return [(generate(learner.engine, prompt, sampling), learner.after_response()) for prompt in prompts]


def generate(engine: Engine, prompt: str, sampling: Sampling | None = None) -> Report:
    return engine.generate(prompt, sampling=sampling or Sampling(), max_new_tokens=LENGTH)


def answers(learner: Learner, prompts: Sequence[str]) -> list[Sample]:
    """Samples of answers, not remembered."""
    found: list[Sample] = []
    for prompt in prompts:
        generate(learner.engine, prompt)
        assert learner.engine.observation is not None
        found += learner._spelling.samples(learner.engine.observation)
    return found


def trained(learner: Learner, samples: Sequence[Sample], steps: int, rate: float = 3e-3) -> Snapshot:
    """What `steps` steps on the samples make of the adapter at its beginning; a negative rate unlearns."""
    trainer = learner._open()
    trainer.load(Snapshot(learner.layout.initial(learner._rank)))
    made = batch(
        [(sample, projected(sample, learner._spelling, 0.0)) for sample in samples], learner._spelling.unmapped
    )
    for _ in range(steps):
        trainer.step(made, rate)
    return trainer.snapshot()


def noise(learner: Learner, scale: float = 0.3, rank: int | None = None) -> Floats:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(learner.layout.width * (rank or learner._rank)) * scale).astype(np.float32)


def same_samples(found: Sequence[Sample], expected: Sequence[Sample]) -> bool:
    names = ("draft", "target", "top_ids", "top_p")
    return len(found) == len(expected) and all(
        a.begin == b.begin and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
        for a, b in zip(found, expected, strict=True)
    )
