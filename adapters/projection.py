"""A target's probabilities carried over to the drafter's vocabulary (DESIGN.md section 6, "projected")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DEPTH = 6  # draft tokens of a spelling that are looked at


def spelling_table(spelling: Sequence[tuple[int, ...]], size: int) -> np.ndarray:
    """int32 [size, DEPTH]: the draft ids that spell each target id, -1 behind their end and where there are none."""
    table = np.full((size, DEPTH), -1, np.int32)
    for target, drafts in enumerate(spelling[:size]):
        table[target, : len(drafts)] = drafts[:DEPTH]
    return table


def starts(pieces: Sequence[bytes | None]) -> np.ndarray:
    """int64 [n]: the byte at which each of n tokens begins; a token without bytes takes no room."""
    return np.cumsum([0, *(len(piece or b"") for piece in pieces[:-1])])[: len(pieces)].astype(np.int64)


def project(
    top_ids: np.ndarray,
    top_p: np.ndarray,
    target: np.ndarray,
    target_starts: np.ndarray,
    draft: np.ndarray,
    draft_starts: np.ndarray,
    table: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Soft labels for the draft tokens of a text that both vocabularies spell.

    top_ids, top_p [n, K]: what the target found likely at its first n tokens. target, target_starts [N >= n] and
    draft, draft_starts [m]: both spellings of the text with the byte at which each token begins. table: see
    `spelling_table`. Returns (where [s], ids [s, K], p [s, K], source [s]): draft positions, p̃ there, each row's p
    summing to 1 (entries of weight 0 have no meaning, an id may come twice), and the target tokens that they are of.

    Where a target token begins, p̃(d) = Σ p(t) over t whose spelling starts with d. Inside a target token, behind its
    draft tokens s, p̃(d | s) = Σ p(t) over t spelled s d… / Σ p(t) over t spelled s and more. A t spelled s exactly
    stays out of the latter: where it is what the target said, the next position begins a target token and has soft
    labels of its own, and both kinds are in the text as often as the target says them.
    A position gets none where the text's own draft token is not how the target's own token is spelled: there, a
    draft token reaches over the end of a target token, and p says nothing about it.
    """
    n, m = min(len(top_ids), len(target)), len(draft)
    ends = np.append(target_starts[1:], np.iinfo(np.int64).max)[:n]
    first = np.searchsorted(draft_starts, target_starts[:n])
    live = (first < m) & (draft_starts[np.minimum(first, m - 1)] == target_starts[:n])
    spelled = table[top_ids[:n]]
    weights = top_p[:n].astype(np.float64)
    where, ids, p, source = [], [], [], []
    for s in range(table.shape[1]):
        at = np.minimum(first + s, m - 1)
        live = live & (first + s < m) & (table[target[:n], s] == draft[at])
        if s:
            live &= draft_starts[at] < ends
        continuing = np.where(spelled[:, :, s] >= 0, weights, 0.0)
        total = continuing.sum(1)
        use = live & (total > 0)
        where.append(at[use])
        ids.append(np.maximum(spelled[use, :, s], 0))
        p.append(continuing[use] / total[use, None])
        source.append(use.nonzero()[0])
        weights = np.where(spelled[:, :, s] == draft[at][:, None], weights, 0.0)
    return np.concatenate(where), np.concatenate(ids), np.concatenate(p), np.concatenate(source)
