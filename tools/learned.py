"""Learned rows of the bench: the drafter after learning, by each loss and rank, from the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from omnidraft.adapters.labels import LOSSES, batch
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.learning_file import Candidate
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.rehearsal import relearn
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.adapters.settings import RANK, Settings
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.adapter_file import load_adapter
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.pair import Pair
from omnidraft.tools.measure import Row

PASSES = 3  # over the answers: a round of learning sees what is fresh once, and replays twice as much
JOINT, INTERLEAVED = "joint", "interleaved"
Head = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """How a row learns: LoRA rank, loss, and λ (None: p(t)).

    `head`: the acceptance head learns too, after every step ("joint") or once the drafter has learned ("interleaved").
    """

    rank: int
    loss: str
    weight: float | None
    head: str | None = None


@dataclass(frozen=True)
class Learned:
    """LoRA parameters for the drafter, and a head for them, None for the shipped one.

    `seconds_a_token`: of learning, for each token of the answers; `losses`: of each step.
    """

    parameters: Mapping[str, np.ndarray]
    head: Head | None
    seconds_a_token: float
    losses: list[float]


def variants() -> dict[str, Variant]:
    """Row name -> how it learns: the paper's losses, and ours at three ranks."""
    weight = Settings().weight
    return {
        "L_DM": Variant(RANK, "paper", 0.0),
        f"L_DM + {weight:g} L_N": Variant(RANK, "paper", weight),
        "L_DM + p(t) L_N": Variant(RANK, "paper", None),
        **{f"projected r{rank}": Variant(rank, "projected", weight) for rank in (8, 16, 32)},
    }


def learn(
    engine: Engine, prompts: Sequence[str], wanted: Mapping[str, Variant], arguments: Mapping[str, Any],
    advance: Callable[[], None],
) -> dict[str, Learned]:  # fmt: skip
    """Answer prompts once, which is the same text for every adapter, then learn it anew for every variant.

    `advance` is called once for each prompt and each variant. Raises OmniDraftError if the drafter has no LoRA inputs,
    or no acceptance head where one shall learn.
    """
    pair = engine.pair
    assert pair.drafter is not None
    info = pair.drafter.info
    if info.lora is None or info.training is None:
        raise OmniDraftError(f"{pair.bundle.path}: its drafter has no LoRA inputs; leave --learn-from out")
    if info.head is None and any(variant.head for variant in wanted.values()):
        raise OmniDraftError(f"{pair.bundle.path}: its drafter has no acceptance head; omnidraft train-head makes one")
    pair.bundle.verify(info.training.values())
    school = _School(
        pair, Spelling.of(pair), pair.bundle.path / info.training["step"], Layout(info.lora["projections"]),
        None if info.head is None else load_adapter(pair.bundle.path / info.head["weights"]),
    )  # fmt: skip
    samples = list(_answers(engine, school.spelling, prompts, arguments, advance))
    found = {}
    for name, variant in wanted.items():
        found[name] = school.teach(samples, variant)
        advance()
    pair.drafter.decoder.set_adapter(None)
    return found


def with_learning(row: Row, learned: Learned | None) -> Row:
    """The row with the speed that is left if learning goes on all the time."""
    if learned is None or row.tokens_per_second is None:
        return row
    return replace(row, with_learning=1 / (1 / row.tokens_per_second + learned.seconds_a_token))


@dataclass(frozen=True)
class _School:
    """What every variant learns with. `step`: the training graph; `head`: the shipped acceptance head."""

    pair: Pair
    spelling: Spelling
    step: Path
    layout: Layout
    head: Head | None

    def teach(self, samples: Sequence[Sample], variant: Variant) -> Learned:
        """From nothing, PASSES over the samples."""
        settings, start = Settings(), self.layout.initial(variant.rank)
        candidate, head = Candidate(Snapshot(start), start, 0, 0, 0), self.head if variant.head else None
        trainer = OnnxStepTrainer(self.step, self.layout, variant.rank, self.pair.threads)
        trainer.load(candidate.snapshot)
        losses, begin = [], perf_counter()
        for group in _batches(samples, settings.batch):
            labelled = [(sample, LOSSES[variant.loss](sample, self.spelling, variant.weight)) for sample in group]
            losses.append(trainer.step(batch(labelled, self.spelling.unmapped), settings.rate))
            candidate.follow(trainer.weights)
            if variant.head == JOINT:
                head = self._relearned(head, candidate, group)
        if variant.head == INTERLEAVED:
            head = self._relearned(head, candidate, samples)
        seconds = perf_counter() - begin
        trainer.close()
        tokens = sum(len(sample.target) for sample in samples)
        return Learned(self.layout.parameters(candidate.average), head, seconds / tokens, losses)

    def _relearned(self, head: Head | None, candidate: Candidate, samples: Sequence[Sample]) -> Head:
        assert self.pair.drafter is not None and head is not None
        self.pair.drafter.decoder.set_adapter(self.layout.parameters(candidate.average))
        return relearn(self.pair, head, samples)


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
