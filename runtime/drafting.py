"""One round's proposals by the coupled draw (DESIGN.md section 4): q̂ over target ids, and x from it.

Pure: the drafter is anything that gives logits behind a path of draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Protocol

import numpy as np

from omnidraft.runtime.sampling import Sampling, draw_from, truncate
from omnidraft.runtime.translation import Kind, Translation

# Draft tokens lighter than 1e-3 of the heaviest, or beyond the 32 heaviest, are left out: any q̂ is lossless.
LOG_FLOOR = log(1e-3)
WIDEST = 32
DEEPEST = 16  # draft tokens of one merge


class DraftModel(Protocol):
    """Next-token logits, float32 [V_draft], behind the context and a path of draft tokens."""

    @property
    def room(self) -> int:
        """The longest path that fits the model's window."""
        ...

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        """The row for `path`, which stays valid until the context changes."""
        ...


@dataclass(frozen=True)
class Proposal:
    """A proposed target token, and the draft tokens that spell it (none for all but the last piece of a split).

    `mass`: q̂ before it is normalised; `expected`: probability of its acceptance, given that of all before it, as it was
    predicted; None where nobody asked.
    """

    token: int
    kind: Kind
    path: tuple[int, ...]
    mass: float
    expected: float | None = None


@dataclass
class Draft:
    """A round's proposals, with how many draft tokens were drawn and how many of them can be translated.

    The coupled draw is made among target tokens, so `translated` adds up the probability that a
    token drawn from q would have had a translation; the paper's rule draws, and counts.
    `laws`: q' of each proposal, only for the paper's verification.
    """

    proposals: list[Proposal] = field(default_factory=list)
    laws: list[np.ndarray] = field(default_factory=list)
    drawn: int = 0
    translated: float = 0

    @property
    def tokens(self) -> list[int]:
        """The proposed target ids."""
        return [proposal.token for proposal in self.proposals]

    @property
    def expected(self) -> list[float]:
        """The expected acceptances; certain ones where nobody asked."""
        return [1.0 if proposal.expected is None else proposal.expected for proposal in self.proposals]


class Pace(Protocol):
    """How a draft goes on: what is expected of a proposal, and whether to draw another."""

    def expect(self, path: tuple[int, ...], law: Law, proposal: Proposal, piece: int, index: int) -> float | None:
        """Probability that the proposal, drawn from `law` behind `path`, is accepted given all before it.

        `piece`: number of the piece of a split; `index`: of the proposal in the draft.
        """
        ...

    def more(self, expected: Sequence[float]) -> bool:
        """Whether to draw on behind these."""
        ...


class Eager:
    """Draws as long as there is room, and expects nothing."""

    def expect(self, path: tuple[int, ...], law: Law, proposal: Proposal, piece: int, index: int) -> float | None:
        """None."""
        return None

    def more(self, expected: Sequence[float]) -> bool:
        """Always."""
        return True


class Row:
    """The likeliest draft tokens of one row of logits: `pairs` of (q, draft id), heaviest first; q sums to 1.

    Temperature 0 gives the probabilities at 1 (see `law`).
    """

    def __init__(self, logits: np.ndarray, temperature: float) -> None:
        # Right after a target pass every numpy call meets cold caches, so the few tokens that matter
        # are picked in three calls and handled as Python numbers from there on.
        temperature = temperature or 1.0
        top = float(logits.max())
        ids = (logits > top + LOG_FLOOR * temperature).nonzero()[0]
        if len(ids) > WIDEST:
            ids = ids[np.argpartition(logits[ids], -WIDEST)[-WIDEST:]]
        weights = [(exp((z - top) / temperature), d) for z, d in zip(logits[ids].tolist(), ids.tolist(), strict=True)]
        total = sum(weight for weight, _ in weights)
        self.pairs = sorted(((weight / total, d) for weight, d in weights), key=lambda pair: (-pair[0], pair[1]))
        self.most, self.head = self.pairs[0]


@dataclass
class Law:
    """q̂: target id -> unnormalised mass, and target id -> the likeliest draft tokens that lead to it.

    `head`: the likeliest draft token d°; `children`: draft ids that merge with it; `coverage`: share
    of the drafter's mass that has a translation.
    """

    masses: dict[int, float]
    spelling: dict[int, tuple[int, ...]]
    head: int
    children: list[int]
    coverage: float


EAGER = Eager()


def law(
    model: DraftModel,
    translation: Translation,
    path: tuple[int, ...],
    temperature: float,
    banned: Sequence[int] = (),
) -> Law:
    """q̂ behind `path`, where the draft ids `banned` cannot come next.

    Masses of draft tokens that begin with the same target token add. A merge is looked for along
    the drafter's greedy path d°₁d°₂… only: each target token whose spelling leaves that path at
    its last draft token at the latest gets ∏ q(d_j | …), and the mass leaves the longest complete
    token before it (of nested n-grams only the minimal extension is subtracted).
    At temperature 0 the masses are those at temperature 1: the likeliest *target* token may be
    spread over several draft tokens, which a one-hot q would not show.
    """
    logits = model.logits(path)
    if banned:
        logits = logits.copy()
        logits[banned] = -np.inf
    row = Row(logits, temperature)
    masses: dict[int, float] = {}
    spelling: dict[int, tuple[int, ...]] = {}
    for q, d in row.pairs:
        pieces = translation.pieces[d]
        if pieces:
            masses[pieces[0]] = masses.get(pieces[0], 0.0) + q
            spelling.setdefault(pieces[0], (d,))
    children: list[int] = []
    owner = translation.pieces[row.head][:1]
    prefix: tuple[int, ...] = (row.head,)
    node, weight = translation.trie.root.children.get(row.head), row.most
    deepest = min(DEEPEST, model.room - len(path) + 1)
    while node is not None and node.children and len(prefix) < deepest:
        after, found = Row(model.logits(path + prefix), temperature), 0.0
        for q, d in after.pairs:
            child = node.children.get(d)
            if child is None or child.target < 0:
                continue
            mass = weight * q
            if mass > masses.get(child.target, 0.0):
                spelling[child.target] = (*prefix, d)
            masses[child.target] = masses.get(child.target, 0.0) + mass
            found += mass
            if len(prefix) == 1:
                children.append(d)
        for token in owner:
            masses[token] = max(masses[token] - found, 0.0)
        node = node.children.get(after.head)
        if node is not None and node.target >= 0:
            owner = (node.target,)
        prefix, weight = (*prefix, after.head), weight * after.most
    return Law(masses, spelling, row.head, children, min(1.0, sum(masses.values())))


def choose(law: Law, sampling: Sampling, position: int) -> int:
    """The drawn x = argmax [log q̂ + g], with the truncation that p gets. -1 if nothing is mapped."""
    if sampling.temperature == 0:
        return min(law.masses, key=lambda token: (-law.masses[token], token), default=-1)
    positive = [(token, mass) for token, mass in law.masses.items() if mass > 0]
    if not positive:
        return -1
    ids, masses = (np.array(column) for column in zip(*sorted(positive), strict=True))
    scores = np.log(masses)
    keep = truncate(scores, sampling)
    return draw_from(ids[keep], scores[keep], sampling.seed, position)


def draft(
    model: DraftModel, translation: Translation, sampling: Sampling, position: int, limit: int, ends: Collection[int],
    pace: Pace = EAGER,
) -> Draft:  # fmt: skip
    """Propose up to `limit` target tokens for the absolute positions from `position` on, at a pace.

    Stops early after a token of `ends`, at the end of the model's window, and where nothing can be translated.
    """
    out = Draft()
    path: tuple[int, ...] = ()
    banned: list[int] = []
    while len(out.proposals) < limit and len(path) <= model.room:
        q_hat = law(model, translation, path, sampling.temperature, banned)
        out.drawn += 1
        out.translated += q_hat.coverage
        token = choose(q_hat, sampling, position + len(out.proposals))
        if token < 0:
            break
        spelled = q_hat.spelling[token]
        for piece, proposal in enumerate(_proposals(q_hat, translation, token)[: limit - len(out.proposals)]):
            expected = pace.expect(path, q_hat, proposal, piece, len(out.proposals))
            out.proposals.append(proposal if expected is None else replace(proposal, expected=expected))
        # A head that was proposed alone was not merged, so what would have merged cannot follow.
        banned = q_hat.children if spelled == (q_hat.head,) else []
        if not pace.more(out.expected) or out.proposals[-1].token in ends:
            break
        path += spelled
    return out


def _proposals(q_hat: Law, translation: Translation, token: int) -> list[Proposal]:
    """What a drawn target token proposes: itself, and the further pieces if it is the first of a split."""
    spelled, mass = q_hat.spelling[token], q_hat.masses[token]
    if len(spelled) > 1:
        return [Proposal(token, Kind.MERGE, spelled, mass)]
    pieces, kind = translation.pieces[spelled[0]], translation.kind(spelled[0])
    return [Proposal(p, kind, spelled if i == len(pieces) - 1 else (), mass) for i, p in enumerate(pieces)]
