"""One round's proposals by the coupled draw (DESIGN.md section 4): q̂ over target ids, and x from it.

Pure: the drafter is anything that gives logits behind a path of draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from omnidraft.runtime.sampling import Sampling, draw_scores, truncate
from omnidraft.runtime.translation import Kind, Translation

FLOOR = 1e-4  # target tokens this much lighter than the heaviest are left out of q̂: any q̂ is lossless
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
    """A proposed target token, and the draft tokens that spell it (none for all but the last piece of a split)."""

    token: int
    kind: Kind
    path: tuple[int, ...]
    mass: float


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


@dataclass
class Law:
    """q̂: target ids [n] with unnormalised masses [n]; entries from `merged` on come from `paths`."""

    ids: np.ndarray
    masses: np.ndarray
    q: np.ndarray
    head: int
    paths: list[tuple[int, ...]]
    children: np.ndarray


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float32 [n] -> probabilities, float32 [n]. Temperature 0 gives those at 1 (see `law`)."""
    scaled = logits / np.float32(temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def law(model: DraftModel, translation: Translation, path: tuple[int, ...], q: np.ndarray, temperature: float) -> Law:
    """q̂ behind `path`, from the draft distribution q float32 [V_draft] there.

    Masses of draft tokens that begin with the same target token add. A merge is looked for along
    the drafter's greedy path d°₁d°₂… only: each target token whose spelling leaves that path at
    its last draft token at the latest gets ∏ q(d_j | …), and the mass leaves the longest complete
    token before it (of nested n-grams only the minimal extension is subtracted).
    At temperature 0 the masses are those at temperature 1: the likeliest *target* token may be
    spread over several draft tokens, which a one-hot q would not show.
    """
    slots = len(translation.slots)
    masses = np.bincount(translation.slot_of, q, slots + 1)[:slots]
    head = int(q.argmax())
    node = translation.trie.root.children.get(head)
    ids, extra = [translation.slots], [masses]
    paths: list[tuple[int, ...]] = []
    children = np.empty(0, np.int64)
    owner = int(translation.slot_of[head])
    owned = masses if owner < slots else None
    weight = float(q[head])
    prefix: tuple[int, ...] = (head,)
    deepest = min(DEEPEST, model.room - len(path) + 1)
    while node is not None and node.children and len(prefix) < deepest:
        after = softmax(model.logits(path + prefix), temperature)
        drafts, targets = node.merges()
        found = weight * after[drafts]
        if owned is not None:
            owned[owner] = max(owned[owner] - found.sum(), 0.0)
        if len(prefix) == 1:
            children = drafts
        ids.append(targets)
        extra.append(found)
        paths += [(*prefix, int(d)) for d in drafts]
        follow = int(after.argmax())
        node = node.children.get(follow)
        if node is not None and node.target >= 0:
            owned, owner = found, int(np.flatnonzero(drafts == follow)[0])
        prefix, weight = (*prefix, follow), weight * float(after[follow])
    return Law(np.concatenate(ids), np.concatenate(extra), q, head, paths, children)


def choose(law: Law, sampling: Sampling, position: int) -> int:
    """Index in q̂ of the drawn x: argmax [log q̂ + g], with the truncation that p gets. -1 if nothing is mapped."""
    top = law.masses.max(initial=0.0)
    if top <= 0:
        return -1
    if sampling.temperature == 0:
        return int(law.masses.argmax())
    alive = np.flatnonzero(law.masses > FLOOR * top)
    scores = np.log(law.masses[alive])
    alive = alive[truncate(scores, sampling)]
    ids = law.ids[alive]
    drawn = draw_scores(np.log(law.masses[alive]), ids, sampling.seed, position)
    same = alive[ids == drawn]
    return int(same[law.masses[same].argmax()])


def draft(
    model: DraftModel, translation: Translation, sampling: Sampling, position: int, limit: int, ends: Collection[int]
) -> Draft:
    """Propose up to `limit` target tokens for the absolute positions from `position` on.

    Stops early after a token of `ends` and where nothing can be translated.
    """
    out = Draft()
    path: tuple[int, ...] = ()
    banned = np.empty(0, np.int64)
    while len(out.proposals) < limit and len(path) <= model.room:
        q = softmax(model.logits(path), sampling.temperature)
        # A head that was proposed alone was not merged, so what would have merged cannot follow.
        q[banned] = 0.0
        q_hat = law(model, translation, path, q, sampling.temperature)
        out.drawn += 1
        out.translated += float(q_hat.masses.sum() / q.sum())
        index = choose(q_hat, sampling, position + len(out.proposals))
        if index < 0:
            break
        token, mass = int(q_hat.ids[index]), float(q_hat.masses[index])
        merged = index - len(translation.slots)
        if merged >= 0:
            spelled = q_hat.paths[merged]
            out.proposals.append(Proposal(token, Kind.MERGE, spelled, mass))
            banned = banned[:0]
        else:
            leading = np.flatnonzero(translation.slot_of == index)
            best = int(leading[q[leading].argmax()])
            spelled, pieces = (best,), translation.pieces[best]
            kind = translation.kind(best)
            room = limit - len(out.proposals)
            for j, piece in enumerate(pieces[:room]):
                whole = spelled if j == len(pieces) - 1 else ()
                out.proposals.append(Proposal(piece, kind, whole, mass))
            banned = q_hat.children if best == q_hat.head else banned[:0]
        if out.proposals[-1].token in ends:
            break
        path += spelled
    return out
