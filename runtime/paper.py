"""The paper's drafting and verification (OmniDraft, arXiv 2507.02659, Eq. 1 and 2), for comparison.

Draft tokens are drawn first and translated afterwards; acceptance is by min(1, p/q'). The law q'
depends on what was drawn, and a draw without a translation is dropped as if it had not been made:
both bias the output when sampling (DESIGN.md section 4 has a worked example of the first). At
temperature 0 the rule is exact. Users reach it only by `--verification paper`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from omnidraft.runtime.drafting import Draft, DraftModel, Proposal
from omnidraft.runtime.noise import uniform
from omnidraft.runtime.sampling import Sampling, probabilities
from omnidraft.runtime.translation import Kind, Translation
from omnidraft.runtime.verification import Verdict

ACCEPT, RESIDUAL, DRAFT = 1, 2, 16  # keep the uniform numbers of one position apart; DRAFT + i for draft token i


def propose(
    model: DraftModel,
    translation: Translation,
    sampling: Sampling,
    position: int,
    limit: int,
    ends: Collection[int],
    size: int,
) -> Draft:
    """Draw `limit` draft tokens, merge the longest cached runs, stop at the first without a translation.

    The law q' of each proposal is float64 [size] over target ids, not normalised:
    Eq. 1 for what was drawn; Eq. 2 takes a merge's mass from its first draft token. A draft token
    with several pieces has no translation in the paper.
    """
    drawn: list[int] = []
    laws: list[np.ndarray] = []
    for i in range(limit):
        q = probabilities(model.logits(tuple(drawn)), (), Sampling(sampling.temperature))
        laws.append(q)
        drawn.append(inverse(q, uniform(sampling.seed, position, DRAFT + i)))
    out, i = Draft(drawn=limit), 0
    while i < limit:
        length, token = _longest(translation, drawn[i:])
        if token < 0:
            break
        q = laws[i]
        direct, mapped = translation.direct, translation.direct >= 0
        q_prime = np.bincount(direct[mapped], q[mapped], size)
        kind, mass = Kind.DIRECT, float(q[drawn[i]])
        if length > 1:
            kind, mass = Kind.MERGE, float(np.prod([laws[i + j][drawn[i + j]] for j in range(length)]))
            q_prime[token] = mass
            if direct[drawn[i]] >= 0:
                q_prime[direct[drawn[i]]] -= mass
        out.proposals.append(Proposal(token, kind, tuple(drawn[i : i + length]), mass))
        out.translated += length
        out.laws.append(q_prime)
        i += length
        if token in ends:
            break
    return out


def verify(
    rows: np.ndarray,
    draft: Draft,
    history: Sequence[int],
    sampling: Sampling,
    position: int,
) -> Verdict:
    """Accept with min(1, p/q'), else draw from (p − q')₊; a bonus token from p if all were accepted.

    Shapes as in `verification.verify`; the draft as `propose` returns it.
    """
    tokens: list[int] = []
    for i, (x, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = probabilities(rows[i], [*history, *tokens], sampling)
        if uniform(sampling.seed, position + i, ACCEPT) * q[x] < p[x]:
            tokens.append(x)
            continue
        residual = np.maximum(p - q, 0.0)
        y = inverse(residual if residual.sum() > 0 else p, uniform(sampling.seed, position + i, RESIDUAL))
        return Verdict([*tokens, y], i)
    k = len(draft.tokens)
    p = probabilities(rows[k], [*history, *tokens], sampling)
    return Verdict([*tokens, inverse(p, uniform(sampling.seed, position + k, RESIDUAL))], k)


def inverse(weights: np.ndarray, u: float) -> int:
    """The index that a uniform number u in (0, 1) selects from unnormalised weights [n]."""
    cumulative = np.cumsum(weights)
    return int(min(np.searchsorted(cumulative, u * cumulative[-1], side="right"), len(weights) - 1))


def _longest(translation: Translation, drawn: Sequence[int]) -> tuple[int, int]:
    """How many of the drawn tokens the longest translation takes, and its target id (-1 for none)."""
    pieces = translation.pieces[drawn[0]]
    best = (1, pieces[0] if len(pieces) == 1 else -1)
    node = translation.trie.root
    for length, d in enumerate(drawn, 1):
        child = node.children.get(d)
        if child is None:
            break
        node = child
        if node.target >= 0:
            best = (length, node.target)
    return best
