"""The speculative loop: draft, verify in one target pass, emit, observe (DESIGN.md section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from omnidraft.runtime import paper
from omnidraft.runtime.causal_model import CausalModel, held
from omnidraft.runtime.clock import PhaseClock
from omnidraft.runtime.decoder import prefill
from omnidraft.runtime.drafting import Draft
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.invariance import CHUNK
from omnidraft.runtime.logprobs import Logprobs, logprobs
from omnidraft.runtime.observation import Observation
from omnidraft.runtime.proposer import Proposer
from omnidraft.runtime.report import Tally
from omnidraft.runtime.sampling import Sampling, draw
from omnidraft.runtime.stop import StopMachine
from omnidraft.runtime.translation import Kind
from omnidraft.runtime.verification import Verdict, verify


@dataclass(frozen=True)
class Chunk:
    """Text that can be shown now, with the token that completed it and whether the drafter proposed that token.

    `logprobs`: how likely the target found the token, where somebody asked.
    """

    text: str
    token: int
    from_draft: bool
    logprobs: Logprobs | None = None


class Generation:
    """One response. Iterate over it once; the fields hold what has happened so far."""

    def __init__(
        self,
        target: CausalModel,
        proposer: Proposer,
        prompt: Sequence[int],
        sampling: Sampling,
        stop: StopMachine,
        clock: PhaseClock,
        least_rows: int,
        budget: int,
        paper_rule: bool = False,
        observation: Observation | None = None,
        top_logprobs: int | None = None,
        reuse: bool = False,
    ) -> None:
        """`prompt`: target ids, not empty; `least_rows`: W₀, every target pass has at least so many rows.

        `observation`: where to write what the target said, if somebody learns from it; `top_logprobs`: of how many
        likeliest tokens chunks shall have logprobs beside the emitted one's, None for no logprobs; `reuse`: whether
        rows that the target holds stand for the beginning of the prompt, where it is the same.

        Takes the target over: a stream that was started before on the same decoder cannot go on.
        """
        self._target, self._proposer, self._sampling, self._stop = target, proposer, sampling, stop
        self._least, self._budget, self._paper = least_rows, budget, paper_rule
        self._observation, self._top = observation, top_logprobs
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.clock, self.tally = clock, Tally()
        self.text = ""
        self.first_token_at: float | None = None  # seconds on the clock
        self.last_token_at = 0.0
        self.predictions: list[tuple[float, bool]] = []  # expected acceptance and outcome, as drafted
        self._overheads: list[float] = []
        target.owner = self
        self.reused_tokens = max(0, min(held(target, prompt), len(prompt) - least_rows)) if reuse else 0
        target.rollback(self.reused_tokens)

    @property
    def active(self) -> bool:
        """Whether no other response has taken the models since."""
        return self._target.owner is self

    @property
    def emitted(self) -> list[int]:
        """The tokens of the response so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def overhead_ms(self) -> float | None:
        """Median milliseconds of a round that neither model was running."""
        return median(self._overheads) * 1e3 if self._overheads else None

    def run(self, prefix: Sequence[int], text: bytes) -> Iterator[Chunk]:
        """Prefill both models, then one round after another until the stop machine ends it.

        `prefix`, `text`: the prompt as the drafter reads it (see `Proposer.begin`).
        """
        clock = self.clock
        try:
            clock.enter("prefill")
            logits = prefill(self._target, self.tokens, CHUNK, self._least)
            self._proposer.begin(self.tokens, prefix, text, clock)
            clock.enter("verify")
            y = draw(logits, self.tokens, self._sampling, len(self.tokens))
            chunks = self._emit(Draft(), Verdict([y], 0), logits[None])
            clock.stop()
            self.first_token_at = clock.total
            while True:
                clock.stop()  # while the consumer has the text, the time is the consumer's
                self.last_token_at = clock.total
                yield from chunks
                if self._stop.finish_reason is not None:
                    break
                if not self.active:
                    raise OmniDraftError("another response was started on these models; finish one stream first")
                chunks = self._round()
        finally:
            clock.stop()
            self.text += self._stop.finish()  # what a cancelled stream held back
            if self.active and self.first_token_at is not None:
                self._proposer.finish()
                clock.stop()

    def _round(self) -> list[Chunk]:
        """Draft, verify in one target pass, emit. The time that no model ran is kept apart."""
        started, models = perf_counter(), self._target.seconds + self._proposer.seconds
        self.clock.enter("draft")
        # The bonus token takes one place of the budget.
        limit = self._budget - len(self.emitted) - 1
        position = len(self.tokens)
        draft = self._proposer.propose(self._sampling, position, limit)
        self.clock.enter("verify")
        rows = [self.tokens[-1], *draft.tokens]
        padding = [rows[-1]] * (self._least - len(rows))
        before = self._target.seconds
        logits = self._target.run(rows + padding)
        verify_seconds = self._target.seconds - before
        if self._paper:
            verdict = paper.verify(logits, draft, self.tokens, self._sampling, position)
        else:
            verdict = verify(logits, draft.tokens, self.tokens, self._sampling, position)
        chunks = self._emit(draft, verdict, logits)
        models = self._target.seconds + self._proposer.seconds - models
        seconds = perf_counter() - started
        self._overheads.append(seconds - models)
        self._proposer.close_round(len(rows + padding), verify_seconds, len(chunks), seconds)
        return chunks

    def _emit(self, draft: Draft, verdict: Verdict, logits: np.ndarray) -> list[Chunk]:
        """Pass a round's tokens through the stop machine. What lies behind the stop never happened."""
        self.clock.enter("other")
        chunks: list[Chunk] = []
        for token, row in zip(verdict.tokens, logits, strict=False):
            likely = None if self._top is None else logprobs(row, token, self._top)
            chunks.append(Chunk(self._stop.push(token), token, len(chunks) < verdict.accepted, likely))
            if self._stop.finish_reason is not None:
                draft.proposals = draft.proposals[: len(chunks)]
                break
        emitted = verdict.tokens[: len(chunks)]
        self.tokens += emitted
        self.text += "".join(chunk.text for chunk in chunks)
        self._target.rollback(len(self.tokens) - 1)
        accepted = min(verdict.accepted, len(chunks))
        self.tally.add(draft, accepted)
        for i, proposal in enumerate(draft.proposals[: len(emitted)]):
            if proposal.expected is not None and proposal.kind is not Kind.LOOKUP:
                self.predictions.append((proposal.expected, i < accepted))
        if self._observation is not None:
            self.clock.enter("learn")
            self._observation.add(emitted, logits)
        self.clock.enter("other")
        self._proposer.observe(draft, emitted)
        return chunks
