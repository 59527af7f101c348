"""Labels: what the positions of a sample learn, by each of the two losses, and the batch that a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.projection import project
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.adapters.trainer import Batch

REST = 1e-3  # least probability of all that is not among the likeliest


@dataclass(frozen=True)
class Labels:
    """What s positions of a sample learn; inputs of the training graphs, before they are weighted.

    at [s]: index of the draft token before the one that is learned; ids, p, on [s, TOP], rest [s]: the law there and
    which entries of it count; label [s]; kl, nll, direct [s].
    """

    at: NDArray[np.int64]
    ids: NDArray[np.int64]
    p: NDArray[np.float64]
    on: NDArray[np.bool_]
    rest: NDArray[np.float64]
    label: NDArray[np.int64]
    kl: NDArray[np.float64]
    nll: NDArray[np.float64]
    direct: NDArray[np.float64]


def projected(sample: Sample, spelling: Spelling, weight: float | None) -> Labels:
    """p̃ at every draft position (DESIGN.md section 6, "projected"), and the likelihood of the draft token that was
    said, by λ = `weight`, or by its p̃ for None.
    """
    draft_starts, target_starts = spelling.starts(sample)
    answer = sample.draft[sample.begin :]
    at, ids, p, source = project(
        sample.top_ids, sample.top_p, sample.target, target_starts, answer, draft_starts, spelling.table
    )
    rest = np.maximum(1 - sample.top_p.astype(np.float64).sum(1), REST)[source]
    ids, p = _merged(ids.astype(np.int64), p)
    p, label = p * (1 - rest)[:, None], answer[at].astype(np.int64)
    said = np.where(ids == label[:, None], p, 0.0).sum(1) if weight is None else np.full(len(at), weight)
    one, none = np.ones(len(at)), np.zeros(len(at))
    return Labels(sample.begin - 1 + at, ids, p, p > 0, rest, label, kl=one, nll=said, direct=none)


def paper(sample: Sample, spelling: Spelling, weight: float | None) -> Labels:
    """OmniDraft (arXiv 2507.02659), section 3.2: reverse KL over the direct-mapped tokens where the target said
    such a one, and the likelihood of the draft tokens of its n-grams, by λ = `weight`, or by p(t) for None.

    The mass that `top_p` lacks is taken as direct-mapped: it cannot be known here.
    """
    draft_starts, target_starts = spelling.starts(sample)
    index = {start: i for i, start in enumerate(draft_starts.tolist())}
    answer = tuple(sample.draft[sample.begin :].tolist())
    direct: list[tuple[int, int]] = []  # (index in the answer's draft tokens, in its target tokens)
    merged: list[tuple[int, int, float]] = []  # (index in the answer's draft tokens, draft id, weight)
    for i, (token, start) in enumerate(zip(sample.target.tolist(), target_starts.tolist(), strict=True)):
        spelled, j = spelling.spelling[token], index.get(start)
        if j is None or not spelled or answer[j : j + len(spelled)] != spelled:
            continue
        if len(spelled) == 1:
            direct.append((j, i))
        else:
            share = float(sample.top_p[i][sample.top_ids[i] == token].sum()) if weight is None else weight
            merged += [(j + s, d, share) for s, d in enumerate(spelled)]
    rows = np.array([i for _, i in direct], np.int64)
    twins, top_p = spelling.twin[sample.top_ids[rows]], sample.top_p[rows].astype(np.float64)
    p, rest = np.where(twins >= 0, top_p, 0.0), np.maximum(1 - top_p.sum(1), REST)
    total = p.sum(1) + rest
    ids, p = _merged(np.maximum(twins, 0), p / total[:, None])
    m, n = len(direct), len(merged)
    law = ((0, n), (0, 0))
    return Labels(
        at=sample.begin - 1 + np.array([j for j, *_ in (*direct, *merged)], np.int64),
        ids=np.pad(ids, law), p=np.pad(p, law), on=np.pad(p > 0, law),
        rest=np.concatenate([rest / total, np.ones(n)]),
        label=np.array([0] * m + [d for _, d, _ in merged], np.int64),
        kl=np.repeat([1.0, 0.0], [m, n]),
        nll=np.array([0.0] * m + [share for *_, share in merged]),
        direct=np.repeat([1.0, 0.0], [m, n]),
    )  # fmt: skip


def batch(samples: Sequence[tuple[Sample, Labels]], unmapped: NDArray[np.float32]) -> Batch:
    """Inputs of the training graphs (see `export/training_graph.py`): the loss is the mean over all positions."""
    length = max(len(sample.draft) for sample, _ in samples)
    rows = np.zeros((len(samples), length), np.int64)
    for row, (sample, _) in zip(rows, samples, strict=True):
        row[: len(sample.draft)] = sample.draft
    labels = [part for _, part in samples]
    count = sum(len(part.at) for part in labels)

    def column(name: str) -> NDArray[np.float32]:
        return np.concatenate([getattr(part, name) for part in labels]).astype(np.float32)[:, None]

    p, on = (np.concatenate([getattr(part, name) for part in labels]) for name in ("p", "on"))
    return {
        "input_ids": rows,
        "positions": np.concatenate([i * length + part.at for i, part in enumerate(labels)]),
        "ids": np.concatenate([part.ids for part in labels]),
        "logp": np.log(p, where=on, out=np.zeros(p.shape)).astype(np.float32),
        "on": on.astype(np.float32),
        "rest_logp": np.log(column("rest")),
        "labels": np.concatenate([part.label for part in labels])[:, None],
        "w_kl": column("kl") / count,
        "w_nll": column("nll") / count,
        "direct": column("direct"),
        "unmapped": unmapped,
    }


def _merged(ids: NDArray[np.int64], p: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows in which each id of weight > 0 comes once, with the sum of its weights."""
    order = np.argsort(ids, axis=1, kind="stable")
    ids, p = np.take_along_axis(ids, order, 1), np.take_along_axis(p, order, 1)
    for i in range(ids.shape[1] - 1):  # a weight moves on to the next entry of the same id
        same = ids[:, i] == ids[:, i + 1]
        p[:, i + 1] += np.where(same, p[:, i], 0)
        p[:, i] = np.where(same, 0, p[:, i])
    return ids, p


LOSSES = {"projected": projected, "paper": paper}
"""By name: functions of a sample, a spelling and λ."""
