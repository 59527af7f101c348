"""Rehearsal: go through remembered responses as drafting would, to see what the acceptance head would have seen.

The text is known, so the target does not run. Features are those of the drafter as it is now: hidden states from
before its adapter changed would teach the head about another drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.head import train
from omnidraft.adapters.samples import Sample
from omnidraft.runtime import drafting
from omnidraft.runtime.acceptance import neutral
from omnidraft.runtime.context import DraftContext
from omnidraft.runtime.drafting import Law, Proposal
from omnidraft.runtime.features import FEATURES, describe
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.policy import LONGEST_DRAFT
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.translation import Translation

REHEARSED = 32  # responses that a head learns from when the drafter's adapter has changed
TEMPERATURES = (0.0, 0.7, 1.0)
FEATURES_FIRST = 6, 3e-3  # epochs and rate for a new head, whose hidden states come in last
HIDDEN_LAST = 2, 1e-4
AGAIN = 4, 1e-4  # for some two thousand proposals; more would learn them by heart


@dataclass(frozen=True)
class Rehearsed:
    """Proposals as the head sees them, hidden float32 [n, H] and features float32 [n, F], with labels float32 [n]."""

    hidden: NDArray[np.float32]
    features: NDArray[np.float32]
    labels: NDArray[np.float32]

    @classmethod
    def of(cls, parts: Iterable[Rehearsed]) -> Rehearsed:
        """Several as one. Raises ValueError for none."""
        parts = list(parts)
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


class Rehearsal:
    """Rehearses responses of a pair with the adapter that its draft decoder has; the decoder's past is lost."""

    def __init__(self, pair: Pair) -> None:
        """The pair must have a drafter whose graph gives hidden states."""
        assert pair.drafter is not None and pair.vocabulary is not None and pair.head is not None
        self._drafter, self._target = pair.drafter, pair.target
        self._width = pair.head.hidden_size
        self._translation = Translation(pair.vocabulary, draft_size=pair.drafter.decoder.vocabulary)

    def run(self, sample: Sample, temperature: float, seed: int = 0) -> Rehearsed:
        """One response, with proposals drawn at a temperature; any text, however it was drawn, will do."""
        drafter, tokens = self._drafter, self._target.tokens
        context = DraftContext(
            drafter.decoder, drafter.tokens, drafter.info.context, sample.draft[: sample.begin].tolist()
        )
        truth, ends = sample.target.tolist(), frozenset(self._target.info.stop_ids)
        sampling = Sampling(temperature, seed=seed)
        pace = _Pace(context, sample, temperature)
        said, at = truth[:1], 1  # the first token comes from the prompt alone
        while at < len(truth):
            context.commit([tokens.bytes_of[t] or b"" for t in said if tokens.bytes_of[t]])
            pace.begin(at)
            limit = min(LONGEST_DRAFT, len(truth) - at)
            drafting.draft(context, self._translation, sampling, at, limit, ends, pace)
            said = truth[at : at + pace.right + 1]
            at += len(said)
        n = len(pace.labels)
        return Rehearsed(
            np.array(pace.hidden, np.float32).reshape(n, self._width),
            np.array(pace.features, np.float32).reshape(n, len(FEATURES)),
            np.array(pace.labels, np.float32),
        )


def relearn(pair: Pair, head: Mapping[str, NDArray[np.float32]], samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """The acceptance head after one rehearsal of the newest responses, with the adapter that the draft decoder has.

    Temperatures take turns.
    """
    rehearsal, newest = Rehearsal(pair), samples[-REHEARSED:]
    seen = Rehearsed.of(
        rehearsal.run(sample, TEMPERATURES[i % len(TEMPERATURES)], i) for i, sample in enumerate(newest)
    )
    if not len(seen.labels):
        return dict(head)
    return train(head, seen.hidden, seen.features, seen.labels, *AGAIN)


def teach(seen: Rehearsed) -> dict[str, NDArray[Any]]:
    """A head from the beginning: from the features alone, and then a little from the hidden states too.

    Learned together from the first, some tens of thousands of proposals are known by heart: on held-out answers a
    cross entropy of .52 in place of .50.
    """
    width = seen.hidden.shape[1]
    head = train(neutral(width), np.zeros_like(seen.hidden), seen.features, seen.labels, *FEATURES_FIRST)
    head["acceptance.w1"][:width] = 0
    return train(head, seen.hidden, seen.features, seen.labels, *HIDDEN_LAST)


class _Pace:
    """Writes down what is proposed, and ends the draft at the first proposal that was not said."""

    def __init__(self, context: DraftContext, sample: Sample, temperature: float) -> None:
        self._context, self._sample, self._temperature = context, sample, temperature
        self.hidden: list[NDArray[np.float32]] = []
        self.features: list[NDArray[np.float32]] = []
        self.labels: list[float] = []

    def begin(self, at: int) -> None:
        """A draft for the tokens of the response from `at` on."""
        self._at, self.right, self._wrong = at, 0, False

    def expect(self, path: tuple[int, ...], law: Law, proposal: Proposal, piece: int, index: int) -> None:
        """Write one proposal down, unless one before it was wrong."""
        hidden, sample, at = self._context.hidden(path), self._sample, self._at + index
        if self._wrong or hidden is None:
            return
        token, kind = proposal.token, proposal.kind
        self.hidden.append(hidden)
        self.features.append(describe(law.masses, law.coverage, token, kind, piece, index, self._temperature))
        q = {token: 1.0} if piece else {t: m for t, m in law.masses.items() if m > 0}
        self.labels.append(label(sample.top_ids[at], sample.top_p[at], q, token, self._temperature))
        self._wrong = token != int(sample.target[at])
        self.right += not self._wrong

    def more(self, expected: Sequence[float]) -> bool:
        """Until one is wrong."""
        return not self._wrong


def label(
    top_ids: NDArray[np.int32], top_p: NDArray[np.float16], q_hat: dict[int, float], token: int, temperature: float
) -> float:
    """P(x = y | x = token) by the coupled draw, where the target's likeliest tokens [TOP] at temperature 1 are known.

    1 / (q̂(t) · Σ_s max(p(s) / p(t), q̂(s) / q̂(t))); at temperature 0, 1 if t = argmax p, else 0 (DESIGN.md section 5;
    Daliri et al., arXiv 2408.07978). `q_hat` need not be normalised; it is that of `temperature`.
    """
    known = top_p > 0
    ids, p = top_ids[known].tolist(), top_p[known].astype(np.float64)
    if temperature == 0:
        return float(token == ids[int(p.argmax())]) if ids else 0.0
    rest = max(0.0, 1 - float(p.sum())) ** (1 / temperature)
    p = p ** (1 / temperature)
    total = float(p.sum()) + rest
    law = dict(zip(ids, (p / total).tolist(), strict=True))
    mine = law.get(token, 0.0)
    mass = sum(q_hat.values())
    if mine == 0 or mass == 0:
        return 0.0
    q = {t: m / mass for t, m in q_hat.items()}
    overlap = sum(max(law.get(s, 0.0) / mine, q.get(s, 0.0) / q[token]) for s in {*law, *q}) + rest / total / mine
    return min(1.0, 1 / (q[token] * overlap))
