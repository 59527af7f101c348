"""The learner: between responses it trains a candidate, and keeps it if it is better than the adapter in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from omnidraft.adapters.heap import give_back
from omnidraft.adapters.index import Facts, Forecast
from omnidraft.adapters.labels import LOSSES, Labels, batch
from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.learning_file import Candidate, LearningFile
from omnidraft.adapters.rehearsal import relearn
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.adapters.settings import RANK, Settings
from omnidraft.adapters.shadow import Shadow
from omnidraft.adapters.store import AdapterStore
from omnidraft.adapters.trainer import Snapshot, Trainer, TrainerError
from omnidraft.adapters.trainers import default_artifacts, default_packages, open_trainer
from omnidraft.runtime.adapter_file import load_adapter
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.state import State

JUDGED, ANCHORED = 8, 4  # fresh samples, and anchors, that a comparison looks at
JUDGE_AFTER = 2  # rounds of learning between two comparisons
SLACK = 0.02  # how much agreement on the anchors a candidate may lose against the drafter as shipped
MOST_MISSES = 2  # comparisons in a row that a candidate may fail to win before what it learned is dropped
MOST_BEHIND = 2  # comparisons in a row that the adapter in use may lose against the drafter as shipped
REPLAYS = 2  # batches to replay for each fresh one


@dataclass
class Round:
    """What a round of learning did. `kept`: whether a candidate was kept, None if none was compared.

    loss: of the fresh samples before they were learned, NaN where nothing could be learned from them; seconds: of the
    whole round; `before`, `after`: agreement with the target on text that none had learned, of the adapter in use and
    of the candidate.
    """

    loss: float
    seconds: float
    kept: bool | None = None
    before: float | None = None
    after: float | None = None
    note: str = ""


class Learner:
    """Watches an engine's responses and changes its adapter between them.

    Text never depends on it. Time is taken from a budget: each second of decoding earns `settings.budget` seconds
    of learning, and a round of learning begins when there is something left.
    """

    def __init__(self, engine: Engine, state: State, settings: Settings, tell: Callable[[str], None]) -> None:
        """Goes on from what the state folder has. Raises OmniDraftError if the engine's drafter cannot learn."""
        pair = engine.pair
        if pair.drafter is None or pair.vocabulary is None:
            raise OmniDraftError("learning needs a drafter; open the engine with a draft")
        drafter, target = pair.drafter.info, pair.target.info
        if drafter.lora is None or drafter.training is None:
            raise OmniDraftError(f"{pair.bundle.path}: its drafter has no LoRA inputs; learning is not possible")
        self.engine, self.settings, self.state, self._tell = engine, settings, state, tell
        pair.bundle.verify(drafter.training.values())
        self.layout = Layout(drafter.lora["projections"])
        self._spelling = Spelling.of(pair)
        self._shadow = Shadow(pair.drafter.decoder, self.layout, self._spelling)
        self.store = AdapterStore(state, drafter, target, self.layout)
        self.folder = f"learning/{drafter.weights_sha256[:12]}-{target.weights_sha256[:12]}"
        self.key = {"drafter": drafter.weights_sha256, "target": target.weights_sha256}
        sizes = pair.drafter.decoder.vocabulary, pair.target.decoder.vocabulary
        self._file = LearningFile(state, self.folder, {**self.key}, *sizes)
        self.memory, self._standing = self._file.load()
        self._version, self._current = self.store.current()
        self._rank = self._rank_of_what_is_there()
        self._trainer: Trainer | None = None
        self.trainer_reason = ""
        self.seconds = 0.0
        engine.observing = True
        engine.keep_answers()
        self._use()

    @property
    def version(self) -> int:
        """The adapter in use, 0 for the drafter as shipped."""
        return 0 if self._version is None else self._version.number

    @property
    def parameters(self) -> dict[str, Floats] | None:
        """LoRA parameters of the adapter in use, None for the drafter as shipped."""
        return None if self._current is None else self.layout.parameters(self._current.lora)

    @property
    def head(self) -> Mapping[str, Floats] | None:
        """The acceptance head that learned with the adapter in use, None for the drafter's own."""
        return None if self._current is None else self._current.head

    def after_response(self) -> Round | None:
        """Remember the engine's last response, and learn if it is time to. None: nothing was learned yet.

        Raises OmniDraftError if the trainer that was asked for dies.
        """
        begin = perf_counter()
        observation, report = self.engine.observation, self.engine.report
        if observation is None or report is None:
            return None
        anchor = self.memory.add(list(self._spelling.samples(observation)))
        self._standing.credit += self.settings.budget * (report.seconds - report.phases.get("learn", 0.0))
        done = None
        if (len(self.memory.fresh) >= self.settings.interval or self.memory.full) and self._standing.credit > 0:
            try:
                done = self._round()
            except TrainerError as error:
                raise OmniDraftError(str(error)) from None
            give_back()
        if anchor or done:
            self._file.save_replay(self.memory)
        spent = perf_counter() - begin
        self._standing.credit -= spent
        self._file.save(self.memory, self._standing)
        self.seconds += spent
        if done:
            done.seconds = spent
        return done

    def close(self) -> None:
        """Free the trainer."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _round(self) -> Round:
        done = Round(float("nan"), 0.0)
        trainer = self._open()
        candidate = self._standing.candidate
        if candidate is not None and candidate.rounds >= JUDGE_AFTER:
            self._judge(candidate, done)
        candidate = self._standing.candidate
        if candidate is None:
            start = self._current or Snapshot(self.layout.initial(self._rank))
            trainer.load(start)
            positions = 0 if self._version is None else self._version.samples
            candidate = Candidate(start, start.lora, 0, 0, positions)
        self._train(trainer, candidate, done)
        candidate.snapshot, candidate.rounds = trainer.snapshot(), candidate.rounds + 1
        self._standing.candidate = candidate
        if not (np.isfinite(candidate.snapshot.lora).all() and np.isfinite(candidate.average).all()):
            self._standing.candidate = None
            done.note = "learning diverged, so the candidate is dropped; a lower rate may help"
        self._standing.rounds += 1
        self.memory.learned()
        return done

    def _rank_of_what_is_there(self) -> int:
        candidate = self._standing.candidate
        now = self._current
        if candidate is not None and now is not None and len(candidate.snapshot.lora) != len(now.lora):
            candidate = self._standing.candidate = None
            self._tell("the adapter in use has another rank than what was learned since; that is dropped")
        learned = candidate.snapshot if candidate is not None else self._current
        if learned is None:
            return self.settings.rank or RANK
        rank = self.layout.rank(learned.lora)
        if self.settings.rank not in (None, rank):
            self._tell(f"going on with rank {rank}, which what was learned has; omnidraft adapters forget begins anew")
        return rank

    def _open(self) -> Trainer:
        if self._trainer is None:
            pair, settings = self.engine.pair, self.settings
            assert pair.drafter is not None and pair.drafter.info.training is not None
            folder = (pair.bundle.path / pair.drafter.info.training["step"]).parent
            self._trainer, self.trainer_reason = open_trainer(
                settings.trainer, folder, self.layout, self._rank, default_packages(), default_artifacts(),
                warn=self._tell, threads=pair.threads,
            )  # fmt: skip
            if self._standing.candidate is not None:
                self._trainer.load(self._standing.candidate.snapshot)
        return self._trainer

    def _train(self, trainer: Trainer, candidate: Candidate, done: Round) -> None:
        """The fresh samples once, then old ones."""
        size, fresh = self.settings.batch, self.memory.fresh
        losses = [self._step(trainer, candidate, fresh[i : i + size]) for i in range(0, len(fresh), size)]
        known = [loss for loss in losses if loss is not None]
        done.loss = float(np.mean(known)) if known else float("nan")
        rng = np.random.default_rng(self._standing.rounds)
        old = self.memory.replay
        for _ in range(REPLAYS * len(losses) if len(old) >= size else 0):
            picked = rng.choice(len(old), size, replace=False)
            self._step(trainer, candidate, [old[i] for i in picked.tolist()])

    def _step(self, trainer: Trainer, candidate: Candidate, samples: list[Sample]) -> float | None:
        pairs = [(sample, self._labels(sample)) for sample in samples]
        pairs = [(sample, labels) for sample, labels in pairs if len(labels.at)]
        if not pairs:
            return None
        candidate.positions += sum(len(labels.at) for _, labels in pairs)
        loss = trainer.step(batch(pairs, self._spelling.unmapped), self.settings.rate)
        candidate.follow(trainer.weights)
        return loss

    def _labels(self, sample: Sample) -> Labels:
        return LOSSES[self.settings.loss](sample, self._spelling, self.settings.weight)

    def _judge(self, candidate: Candidate, done: Round) -> None:
        """Compare on fresh samples, which none has learned, and on anchors, which none ever will."""
        measure, now = self._shadow.measure, None if self._current is None else self._current.lora
        fresh = self.memory.fresh[:JUDGED]
        done.before, done.after = measure(now, fresh), measure(candidate.average, fresh)
        last = measure(candidate.snapshot.lora, fresh)
        if last > done.after:  # the average lags behind where what is said has changed
            candidate, done.after = replace(candidate, average=candidate.snapshot.lora, steps=0), last
        shipped = done.before if now is None else measure(None, fresh)
        better = done.after > done.before
        done.kept = better and self._keeps_anchors(candidate.average)
        if done.kept:
            facts = Facts(self.settings.loss, candidate.positions, Forecast(done.before, done.after))
            head = self._head_for(candidate.average)
            self._current = replace(candidate.snapshot, lora=candidate.average, head=head)
            self._version = self.store.add(self._current, facts)
        in_use = done.after if done.kept else done.before
        behind = self._current is not None and in_use < shipped
        self._standing.behind = self._standing.behind + 1 if behind else 0
        misses = 0 if done.kept else MOST_MISSES if better else candidate.misses + 1  # better, but it forgets
        self._standing.candidate = None if misses >= MOST_MISSES else replace(candidate, rounds=0, misses=misses)
        if self._standing.behind >= MOST_BEHIND:
            self._back_to_shipped(done)
        self._use()

    def _head_for(self, lora: Floats) -> Mapping[str, Floats] | None:
        """The head in use after a rehearsal with new weights, whose hidden states are others."""
        pair = self.engine.pair
        if pair.head is None or pair.drafter is None or pair.drafter.info.head is None:
            return None
        pair.drafter.decoder.set_adapter(self.layout.parameters(lora))
        start = self.head or load_adapter(pair.bundle.path / pair.drafter.info.head["weights"])
        return relearn(pair, start, [*self.memory.replay, *self.memory.fresh])

    def _keeps_anchors(self, lora: Floats) -> bool:
        rng = np.random.default_rng(self._standing.rounds)
        picked = rng.permutation(len(self.memory.anchors))[:ANCHORED]
        anchors = [self.memory.anchors[i] for i in picked.tolist()]
        if not anchors:
            return True
        return self._shadow.measure(lora, anchors) >= self._shadow.measure(None, anchors) - SLACK

    def _back_to_shipped(self, done: Round) -> None:
        self._standing.behind, self._standing.candidate = 0, None
        self._version = self._current = None
        self.store.use(0)
        done.note = "the drafter as shipped is better for what is said now: back to it"

    def _use(self) -> None:
        self.engine.use_adapter(self.parameters, self.head)
