"""Soft labels: the projection against its definition, and the direction of the loss."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.adapters.projection import project, spelling_table, starts
from omnidraft.tools.training import loss
from omnidraft.tools.training.loss import distillation_loss

# Target tokens and their spelling in the drafter's a=0, b=1, c=2, ab=3.
TARGET = [b"a", b"b", b"c", b"ab", b"abc", b"bc", b"cab", b"abcab"]
SPELLING = [(0,), (1,), (2,), (3,), (3, 2), (1, 2), (2, 3), (3, 2, 3)]
DRAFT = [b"a", b"b", b"c", b"ab"]


def spell(text: bytes) -> list[int]:
    """The drafter's own spelling: "ab" wherever it can."""
    ids, at = [], 0
    while at < len(text):
        ids.append(3 if text[at : at + 2] == b"ab" else DRAFT.index(text[at : at + 1]))
        at += len(DRAFT[ids[-1]])
    return ids


def by_definition(p: np.ndarray, target: list[int], draft: list[int]) -> dict[int, dict[int, float]]:
    """Draft position -> p̃, from dense p [n, V_target]."""
    begins = list(accumulate((len(DRAFT[d]) for d in draft), initial=0))
    soft: dict[int, dict[int, float]] = {}
    at = 0
    for law, token in zip(p, target, strict=True):
        spelling = SPELLING[token]
        if at in begins[:-1]:
            first = begins.index(at)
            for s in range(len(spelling)):
                if tuple(draft[first : first + s + 1]) != spelling[: s + 1]:
                    break
                masses: dict[int, float] = {}
                for t, weight in enumerate(law):
                    if SPELLING[t][:s] == spelling[:s] and len(SPELLING[t]) > s:
                        masses[SPELLING[t][s]] = masses.get(SPELLING[t][s], 0.0) + weight
                soft[first + s] = {d: mass / sum(masses.values()) for d, mass in masses.items()}
        at += len(TARGET[token])
    return soft


@settings(max_examples=150)
@given(st.lists(st.integers(0, len(TARGET) - 1), min_size=1, max_size=8), st.integers(0, 2**32))
def test_projection_is_its_definition(target: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(len(TARGET), 0.7), len(target))
    order = np.argsort(-p, 1)
    draft = spell(b"".join(TARGET[t] for t in target))
    where, ids, weights, _ = project(
        order, np.take_along_axis(p, order, 1),
        np.array(target), starts([TARGET[t] for t in target]), np.array(draft), starts([DRAFT[d] for d in draft]),
        spelling_table(SPELLING, len(TARGET)),
    )  # fmt: skip
    wanted = by_definition(p, target, draft)
    assert sorted(where.tolist()) == sorted(wanted)
    for at, row, masses in zip(where.tolist(), ids, weights, strict=True):
        dense = np.bincount(row, masses, len(DRAFT))
        assert np.allclose(dense, [wanted[at].get(d, 0.0) for d in range(len(DRAFT))])


def test_an_end_of_turn_is_projected_and_a_long_draft_token_is_not() -> None:
    """Target a, b, end; the draft says ab, end: p at "b" has no draft position, and p at "a" says nothing about ab."""
    table = spelling_table([*SPELLING, (4,)], 9)
    top = np.array([[0, 3], [1, 2], [8, 0]])
    where, ids, p, _ = project(
        top, np.full((3, 2), 0.5), np.array([0, 1, 8]), np.array([0, 1, 2]), np.array([3, 4]), np.array([0, 2]), table
    )
    assert where.tolist() == [1] and ids.tolist() == [[4, 0]] and p.tolist() == [[0.5, 0.5]]


def gradient(weight: float, logits: np.ndarray, soft_p: list[float]) -> np.ndarray:
    values = torch.tensor(logits[None], dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(
        values, torch.tensor([2]), torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([soft_p]), weight
    )
    loss.backward()
    return np.asarray(values.grad[0])


def test_the_gradient_is_q_minus_the_target() -> None:
    logits = np.array([0.3, -1.0, 0.7, 0.1])
    q = np.exp(logits) / np.exp(logits).sum()
    soft, hard = np.array([0.75, 0.25, 0, 0]), np.array([0, 0, 1.0, 0])
    for weight in (0.0, 0.3, 1.0):
        expected = q - (1 - weight) * hard - weight * soft
        assert np.allclose(gradient(weight, logits, [0.75, 0.25]), expected, atol=1e-6)
    agreed = np.log([0.75, 0.25, 1e-12, 1e-12])
    assert np.abs(gradient(1.0, agreed, [0.75, 0.25])).max() < 1e-6, "no push where q is p̃"


def test_positions_without_soft_labels_keep_their_hard_ones() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    labels, soft_ids, soft_p = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    none = torch.full((5,), -1)
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(distillation_loss(logits, labels, none, soft_ids, soft_p, 1.0), plain)
    one = none.clone()
    one[1] = 0
    assert not torch.allclose(distillation_loss(logits, labels, one, soft_ids, soft_p, 1.0), plain)
    one_hot = (torch.tensor([[1, 0]]), torch.tensor([[1.0, 0.0]]))
    assert torch.allclose(distillation_loss(logits, labels, one, *one_hot, 0.5), plain), "a one-hot p̃ is a hard label"


def test_the_loss_and_its_gradient_are_those_of_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd, in chunks that do not divide the positions, with and without labels of each kind."""
    monkeypatch.setattr(loss, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 11, generator=generator)
    labels = torch.randint(-1, 11, (30,), generator=generator)
    soft = torch.randint(-1, 5, (30,), generator=generator)
    ids, p = torch.randint(0, 11, (5, 3), generator=generator), torch.rand(5, 3, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value = loss.distillation_loss(ours, labels, soft, ids, p, 0.3)
    log_q = torch.log_softmax(theirs, -1)
    terms = []
    for n in range(30):
        if labels[n] >= 0:
            hard = -log_q[n, labels[n]]
            toward = -(p[soft[n]] * log_q[n, ids[soft[n]]]).sum()
            terms.append(hard if soft[n] < 0 else 0.7 * hard + 0.3 * toward)
    expected = torch.stack(terms).mean()
    assert torch.allclose(value, expected, atol=1e-6)
    (value * 2).backward()
    (expected * 2).backward()
    assert theirs.grad is not None and torch.allclose(ours.grad, theirs.grad, atol=1e-6)
