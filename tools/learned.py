"""Learned rows of the bench: the drafter after learning, by each loss and rank, from the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from omnidraft.adapters.labels import LOSSES, batch
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.learning_file import Candidate
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.adapters.settings import RANK, Settings
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.measure import Row

PASSES = 3  # over the answers: a round of learning sees what is fresh once, and replays twice as much


@dataclass(frozen=True)
class Learned:
    """LoRA parameters for the drafter, and the seconds of learning for each token of the answers."""

    parameters: Mapping[str, np.ndarray]
    seconds_a_token: float


def variants() -> dict[str, tuple[int, str, float | None]]:
    """Row name -> rank, loss and λ: the paper's losses, and ours at three ranks."""
    weight = Settings().weight
    return {
        "L_DM": (RANK, "paper", 0.0),
        f"L_DM + {weight:g} L_N": (RANK, "paper", weight),
        "L_DM + p(t) L_N": (RANK, "paper", None),
        **{f"projected r{rank}": (rank, "projected", weight) for rank in (8, 16, 32)},
    }


def learn(
    engine: Engine, prompts: Sequence[str], arguments: Mapping[str, Any], advance: Callable[[], None]
) -> dict[str, Learned]:
    """Answer prompts once, which is the same text for every adapter, then learn it anew for every variant.

    Raises OmniDraftError if the drafter has no LoRA inputs.
    """
    pair, settings = engine.pair, Settings()
    assert pair.drafter is not None
    info = pair.drafter.info
    if info.lora is None or info.training is None:
        raise OmniDraftError(f"{pair.bundle.path}: its drafter has no LoRA inputs; leave --learn-from out")
    pair.bundle.verify(info.training.values())
    layout = Layout(info.lora["projections"])
    spelling = Spelling.of(pair)
    samples = list(_answers(engine, spelling, prompts, arguments, advance))
    tokens = sum(len(sample.target) for sample in samples)
    found = {}
    for name, (rank, loss, weight) in variants().items():
        trainer = OnnxStepTrainer(pair.bundle.path / info.training["step"], layout, rank, pair.threads)
        start = layout.initial(rank)
        candidate = Candidate(Snapshot(start), start, 0, 0, 0)
        trainer.load(candidate.snapshot)
        begin = perf_counter()
        for group in _batches(samples, settings.batch):
            labelled = [(sample, LOSSES[loss](sample, spelling, weight)) for sample in group]
            trainer.step(batch(labelled, spelling.unmapped), settings.rate)
            candidate.follow(trainer.weights)
        seconds = perf_counter() - begin
        found[name] = Learned(layout.parameters(candidate.average), seconds / tokens)
        trainer.close()
        advance()
    return found


def with_learning(row: Row, learned: Learned | None) -> Row:
    """The row with the speed that is left if learning goes on all the time."""
    if learned is None or row.tokens_per_second is None:
        return row
    return replace(row, with_learning=1 / (1 / row.tokens_per_second + learned.seconds_a_token))


def _answers(
    engine: Engine, spelling: Spelling, prompts: Sequence[str], arguments: Mapping[str, Any],
    advance: Callable[[], None],
) -> Iterator[Sample]:  # fmt: skip
    engine.observing = True
    for prompt in prompts:
        engine.generate(prompt, **arguments)
        assert engine.observation is not None
        yield from spelling.samples(engine.observation)
        advance()
    engine.observing = False


def _batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """PASSES over the samples: the first in their order, then shuffled."""
    rng = np.random.default_rng(0)
    for number in range(PASSES):
        order = rng.permutation(len(samples)) if number else np.arange(len(samples))
        for i in range(0, len(order), size):
            yield [samples[j] for j in order[i : i + size].tolist()]
