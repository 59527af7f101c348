"""What positions of a sample learn, against the definitions; and how a response becomes samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import DRAFT_END, DRAFTS, TARGET_END, TARGETS, begins, both, dense, observed, spelling

from omnidraft.adapters import samples as module
from omnidraft.adapters.labels import REST, Labels, batch, paper, projected
from omnidraft.adapters.samples import FAR, Sample
from omnidraft.adapters.shadow import agreement
from omnidraft.runtime.observation import TOP, Observation
from omnidraft.runtime.vocabulary import build_map

SPELLING = spelling()
said = st.lists(st.integers(0, len(TARGETS) - 2), max_size=8)  # without d, which the drafter cannot say


def sample_of(tokens: list[int], seed: int = 0, missing: float = 0.0) -> Sample:
    (sample,) = SPELLING.samples(observed([*tokens, TARGET_END], seed, missing))
    return sample


def laws(labels: Labels) -> dict[int, np.ndarray]:
    """The dense law [V_draft] of each position, by index of the draft token before the learned one."""
    found = {}
    for row, at in enumerate(labels.at.tolist()):
        found[at] = np.bincount(labels.ids[row], np.where(labels.on[row], labels.p[row], 0), len(DRAFTS) + 1)
    return found


def by_definition(sample: Sample) -> dict[int, tuple[np.ndarray, float]]:
    """Index before each learned draft token -> (p̃, rest), token by token."""
    draft, target, spelled = *begins(sample), SPELLING.spelling
    answer, found = sample.draft[sample.begin :].tolist(), {}
    for token, at, law in zip(sample.target.tolist(), target, dense(sample), strict=True):
        if at not in draft:
            continue
        first, rest = draft.index(at), max(1 - law.sum(), REST)
        for s in range(len(spelled[token])):
            if tuple(answer[first : first + s + 1]) != spelled[token][: s + 1]:
                break
            path = spelled[token][:s]
            masses = np.zeros(len(DRAFTS) + 1)
            for t, mass in enumerate(law):
                if spelled[t][:s] == path and len(spelled[t]) > s:
                    masses[spelled[t][s]] += mass
            if masses.sum() > 0:
                found[sample.begin - 1 + first + s] = (masses / masses.sum() * (1 - rest), rest)
    return found


@settings(max_examples=100, deadline=None)
@given(said, st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.7]))
def test_projected_labels_are_their_definition(tokens: list[int], seed: int, missing: float) -> None:
    sample = sample_of(tokens, seed, missing)
    labels = projected(sample, SPELLING, 0.0)
    found, wanted = laws(labels), by_definition(sample)
    assert sorted(found) == sorted(wanted)
    for at, rest in zip(labels.at.tolist(), labels.rest, strict=True):
        assert np.allclose(found[at], wanted[at][0]) and rest == pytest.approx(wanted[at][1])
    assert np.all(labels.kl == 1) and not labels.nll.any() and not labels.direct.any()


@settings(max_examples=100, deadline=None)
@given(said, st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.7]), st.sampled_from([0.0, 0.2, None]))
def test_the_papers_labels_are_their_definition(
    tokens: list[int], seed: int, missing: float, weight: float | None
) -> None:
    """Of a target token with a twin: p over the tokens with one. Of an n-gram: its draft tokens, by λ or p(t)."""
    sample = sample_of(tokens, seed, missing)
    draft, target = begins(sample)
    answer, p = sample.draft[sample.begin :].tolist(), dense(sample)
    direct, merged = {}, {}
    for i, (token, at) in enumerate(zip(sample.target.tolist(), target, strict=True)):
        spelled = SPELLING.spelling[token]
        first = draft.index(at) if at in draft else len(draft)
        if tuple(answer[first : first + len(spelled)]) != spelled:
            continue
        if len(spelled) > 1:
            merged |= {
                sample.begin - 1 + first + s: (d, p[i, token] if weight is None else weight)
                for s, d in enumerate(spelled)
            }
        else:
            law = np.zeros(len(DRAFTS) + 1)
            for t, entry in enumerate(SPELLING.spelling):
                if len(entry) == 1:
                    law[entry[0]] += p[i, t]
            direct[sample.begin - 1 + first] = law / (law.sum() + max(1 - p[i].sum(), REST))
    labels = paper(sample, SPELLING, weight)
    found = laws(labels)
    assert sorted(found) == sorted([*direct, *merged])
    for row, at in enumerate(labels.at.tolist()):
        if at in direct:
            assert np.allclose(found[at], direct[at])
            assert (labels.kl[row], labels.nll[row], labels.direct[row]) == (1, 0, 1)
        else:
            assert (labels.label[row], labels.nll[row]) == (merged[at][0], pytest.approx(merged[at][1]))
            assert (labels.kl[row], labels.direct[row]) == (0, 0) and not labels.on[row].any()


@settings(max_examples=60, deadline=None)
@given(said, st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.7]), st.sampled_from(["projected", 0.2, None]))
def test_every_law_sums_to_one_and_names_an_id_once(
    tokens: list[int], seed: int, missing: float, loss: str | float | None
) -> None:
    sample = sample_of(tokens, seed, missing)
    labels = projected(sample, SPELLING, 0.0) if isinstance(loss, str) else paper(sample, SPELLING, loss)
    assert np.allclose(np.where(labels.on, labels.p, 0).sum(1) + labels.rest, 1)
    assert np.all(labels.rest >= REST / 2) and np.all(labels.p[labels.on] > 0)
    for ids, on in zip(labels.ids, labels.on, strict=True):
        assert len(set(ids[on].tolist())) == on.sum()
    assert len(set(labels.at.tolist())) == len(labels.at)
    assert labels.at.min(initial=sample.begin - 1) >= sample.begin - 1
    assert labels.at.max(initial=0) <= len(sample.draft) - 2
    likelihood = labels.kl == 0
    assert np.array_equal(labels.label[likelihood], sample.draft[labels.at[likelihood] + 1])


def worked() -> Sample:
    """The target said abc, b, end; the drafter spells that ab c b end behind a context of two tokens."""
    tops = [([5, 3, 0, 1], [0.5, 0.25, 0.125, 0.0625]), ([1, 4, 0], [0.5, 0.25, 0.25]), ([9, 2], [0.75, 0.25])]
    seen = Observation([DRAFT_END], b"c", [5, 1, TARGET_END])
    seen.tops += [(np.array(ids, np.int32), np.array(p, np.float32)) for ids, p in tops]
    (sample,) = SPELLING.samples(seen)
    return sample


def test_a_worked_example() -> None:
    """Written out by hand. a b c ab end are 0 1 2 3 4 for the drafter; a b c ab bc abc … end 0 1 2 3 4 5 … 9."""
    sample = worked()
    assert sample.draft.tolist() == [4, 2, 3, 2, 1, 4] and sample.begin == 2
    labels = projected(sample, SPELLING, 0.0)
    assert labels.at.tolist() == [1, 3, 4, 2], "before ab, b and end; and before the c inside abc"
    assert labels.rest == pytest.approx([0.0625, REST, REST, 0.0625])
    found = laws(labels)
    # abc and ab begin with ab; a and b stand for themselves: .75 .125 .0625 of .9375, over what is not the rest.
    assert found[1] == pytest.approx([0.125, 0.0625, 0, 0.75, 0])
    assert found[2] == pytest.approx([0, 0, 0.9375, 0, 0]), "behind ab, only abc goes on"
    assert found[3] == pytest.approx(np.array([0.25, 0.75, 0, 0, 0]) * (1 - REST)), "bc begins with b"
    assert found[4] == pytest.approx(np.array([0, 0, 0.25, 0, 0.75]) * (1 - REST))

    labels = paper(sample, SPELLING, None)
    assert labels.at.tolist() == [3, 4, 1, 2] and labels.kl.tolist() == [1, 1, 0, 0]
    assert labels.label[2:].tolist() == [3, 2] and labels.nll.tolist() == [0, 0, 0.5, 0.5], "abc had p = .5"
    assert paper(sample, SPELLING, 0.2).nll.tolist() == [0, 0, 0.2, 0.2]
    found = laws(labels)
    assert found[3] == pytest.approx(np.array([0.25, 0.5, 0, 0, 0]) / (0.75 + REST)), "bc has no twin"
    assert found[4] == pytest.approx(np.array([0, 0, 0.25, 0, 0.75]) / (1 + REST))


def test_projected_weighs_the_draft_token_that_was_said() -> None:
    sample = worked()
    fixed, dynamic = (projected(sample, SPELLING, weight) for weight in (0.2, None))
    assert np.array_equal(fixed.label, sample.draft[fixed.at + 1]) and fixed.nll.tolist() == [0.2] * len(fixed.at)
    share = [law[token] for law, token in zip(laws(dynamic).values(), dynamic.label.tolist(), strict=True)]
    assert dynamic.nll == pytest.approx(share) and not projected(sample, SPELLING, 0.0).nll.any()


def test_draft_tokens_without_a_twin_are_unmapped() -> None:
    assert SPELLING.twin.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, DRAFT_END]
    wide = module.Spelling(*both(), build_map(*both()), draft_size=len(DRAFTS) + 3)
    assert wide.unmapped.tolist() == [0] * (len(DRAFTS) + 1) + [np.float32(FAR)] * 2


def test_a_batch_shifts_positions_by_rows_and_weighs_all_alike() -> None:
    pairs = [(s, projected(s, SPELLING, 0.0)) for s in (sample_of([0, 5, 7]), sample_of([4]), worked())]
    made = batch(pairs, SPELLING.unmapped)
    longest = max(len(sample.draft) for sample, _ in pairs)
    assert made["input_ids"].shape == (3, longest)
    count = sum(len(labels.at) for _, labels in pairs)
    learned = np.concatenate([sample.draft[labels.at] for sample, labels in pairs])
    assert np.array_equal(made["input_ids"].ravel()[made["positions"]], learned)
    row = np.repeat(range(3), [len(labels.at) for _, labels in pairs])
    assert np.array_equal(made["positions"] // longest, row), "each in its own row"
    assert made["w_kl"].sum() == pytest.approx(1) and made["w_kl"].shape == (count, 1)
    p = np.concatenate([labels.p for _, labels in pairs])
    assert np.allclose(np.exp(made["logp"]) * made["on"], p) and np.isfinite(made["logp"]).all()
    sizes = {"ids": (count, TOP), "on": (count, TOP), "rest_logp": (count, 1), "labels": (count, 1)}
    assert {name: made[name].shape for name in sizes} == sizes
    assert {name: made[name].dtype.name for name in ("input_ids", "ids", "labels", "logp", "w_nll")} == {
        "input_ids": "int64", "ids": "int64", "labels": "int64", "logp": "float32", "w_nll": "float32",
    }  # fmt: skip


def test_agreement_is_the_overlap_of_both_laws() -> None:
    sample = worked()
    labels = projected(sample, SPELLING, 0.0)
    logits = np.random.default_rng(0).normal(size=(len(sample.draft) - 1, 5)).astype(np.float32)
    q = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    wanted = [np.minimum(q[at], law).sum() for at, law in laws(labels).items()]
    assert agreement(logits, labels) == pytest.approx(wanted)
    for at, law in laws(labels).items():
        logits[at] = np.log(np.maximum(law, 1e-9))
    assert agreement(logits, labels) == pytest.approx(1 - labels.rest, abs=1e-3), "all but what is not known"


# A response in samples


def test_a_response_is_cut_into_pieces_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER", 3)
    monkeypatch.setattr(module, "PREFIX", 4)
    tokens = [0, 5, 7, 3, 1, 2, 4, TARGET_END]
    seen = observed(tokens)
    found = list(SPELLING.samples(seen))
    assert [sample.target.tolist() for sample in found] == [tokens[:3], tokens[3:6], tokens[6:]]
    text = [DRAFT_END, 2, 0]  # the prefix, and ca
    for sample in found:
        assert sample.draft[: sample.begin].tolist() == text[-4:]
        text += sample.draft[sample.begin :].tolist()
        assert len(sample.top_ids) == len(sample.top_p) == len(sample.target)
    assert text[-1] == DRAFT_END
    for row, (_, p) in zip(np.concatenate([s.top_p for s in found]), seen.tops, strict=True):
        assert np.array_equal(row[: len(p)], p.astype(np.float16)) and not row[len(p) :].any()


def test_text_that_the_drafter_cannot_say_ends_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER", 2)
    d = TARGETS.index("d")
    assert [s.target.tolist() for s in SPELLING.samples(observed([0, 1, 2, d, 0, 1]))] == [[0, 1]]
    assert list(SPELLING.samples(Observation([], b"d", [0], observed([0]).tops))) == []
    assert list(SPELLING.samples(Observation([], b"a"))) == [], "nothing was said"


def test_an_answer_without_a_draft_token_is_no_sample() -> None:
    """A special token that has no role for the drafter."""
    vocabulary = build_map(*both())
    vocabulary.spelling[TARGET_END] = ()
    without = module.Spelling(*both(), vocabulary, len(DRAFTS) + 1)
    assert list(without.samples(observed([TARGET_END]))) == []
    (sample,) = without.samples(observed([0, TARGET_END]))
    assert sample.draft[sample.begin :].tolist() == [0] and len(projected(sample, without, 0.0).at) == 1


def test_samples_fit_what_the_drafter_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER", 2)
    tokens = [0, 0, 7, 7, 1, 1]  # abcab is three draft tokens
    assert [len(s.draft) for s in spelling().samples(observed(tokens))] == [5, 11, 13]
    found = list(spelling(6).samples(observed(tokens)))
    assert [s.target.tolist() for s in found] == [[0, 0], [1, 1]], "six tokens leave no room for one before them"
    assert [(len(s.draft), s.begin) for s in found] == [(5, 3), (6, 4)]
    assert found[1].draft.tolist() == [3, 3, 2, 3, 1, 1], "the end of what was left out is context"
