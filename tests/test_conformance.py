"""What every proposer, policy, verification, trainer, tokenizer family and decoder must hold (see `registry`).

The text is that of plain decoding, budgets and stops are kept, a response that was cut short leaves nothing behind, the
same questions get the same answers, and counts add up. The checks are functions, so that broken parts can be shown to
fail them: the last test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import NOWHERE
from learning import WHY_NOT
from registry import CASES, DECODERS, Case, Knowing, Models, engine_of

from omnidraft.adapters.learner import Learner
from omnidraft.adapters.settings import Settings
from omnidraft.adapters.trainers import NAME
from omnidraft.runtime import generation
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.drafting import Draft
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.generation import Chunk
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.report import Report, Tally
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.verification import Verdict

pytest.importorskip("torch")
PROMPTS = ("The boat came back", "def total(values): 240", "Wasser é 100 \N{SNOWMAN}")
LENGTH = 24
QUICK: dict[str, Any] = {"rank": 4, "batch": 1, "interval": 1, "budget": 100.0}
Open = Callable[[], "Subject"]


class Subject:
    """A case that can be asked, and plain decoding on the same models."""

    def __init__(self, case: Case, pair: Pair, calibration: Calibration, folder: Path) -> None:
        self.case, self.pair, self._calibration, self._folder = case, pair, calibration, folder
        state = State(folder, pytest.fail)
        self.engine = engine_of(case, pair, calibration, state)
        self._proposer = self.engine._proposer
        self._proposer.propose = within_limit(self._proposer.propose)  # type: ignore[method-assign]
        settings = Settings(trainer=case.trainer or "auto", **QUICK)
        self.learner = Learner(self.engine, state, settings, pytest.fail) if case.trainer else None
        self.rounds_of_learning = 0

    def close(self) -> None:
        if self.learner is not None:
            self.learner.close()

    def with_stop_ids(self, ids: Sequence[int], folder: Path) -> Subject:
        target = replace(self.pair.target, info=replace(self.pair.target.info, stop_ids=tuple(ids)))
        return Subject(self.case, replace(self.pair, target=target), self._calibration, folder)

    def plain(self, prompt: str, sampling: Sampling, **arguments: Any) -> Report:
        off = Engine(self.pair, Options("off"), NOWHERE, self._calibration)
        return off.generate(prompt, sampling=sampling, **{"max_new_tokens": LENGTH, **arguments})

    def chunks(self, prompt: str, sampling: Sampling, cut: int | None = None, **arguments: Any) -> list[Chunk]:
        """The answer, or its first `cut` chunks; then what is learned from it, where the case learns."""
        if isinstance(self._proposer, Knowing):
            self._proposer.truth = self.plain(prompt, sampling).tokens
        found = []
        with closing(self.engine.stream(prompt, sampling, **{"max_new_tokens": LENGTH, **arguments})) as stream:
            for chunk in stream:
                found.append(chunk)
                if len(found) == cut:
                    break
        if self.learner is not None:
            self.rounds_of_learning += self.learner.after_response() is not None
        return found

    def ask(self, prompt: str, sampling: Sampling, **arguments: Any) -> Report:
        self.chunks(prompt, sampling, **arguments)
        assert self.engine.report is not None
        return self.engine.report


def within_limit(propose: Callable[..., Draft]) -> Callable[..., Draft]:
    def checked(sampling: Sampling, position: int, limit: int) -> Draft:
        draft = propose(sampling, position, limit)
        assert len(draft.proposals) <= limit, "more proposals than there is room for"
        return draft

    return checked


@pytest.fixture(scope="module")
def pairs(toy_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Pair, Calibration]]:
    """Pairs are loaded and measured once."""
    known: dict[tuple[str, str], tuple[Pair, Calibration]] = {}

    def pair(case: Case) -> tuple[Pair, Calibration]:
        key = case.decoder, case.family
        if key not in known:
            loaded = DECODERS[case.decoder](toy_models, case.family, tmp_path_factory.mktemp("scratch"))
            known[key] = loaded, calibrate(loaded, NOWHERE)
        return known[key]

    return pair


@pytest.fixture
def opened(
    pairs: Callable[[Case], tuple[Pair, Calibration]], tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Case], Open]]:  # fmt: skip
    """Opens subjects of a case, each with a state folder of its own, and closes them."""
    subjects: list[Subject] = []

    def of(case: Case) -> Open:
        if case.trainer == NAME:
            if WHY_NOT:
                pytest.skip(WHY_NOT)
            monkeypatch.setenv("OMNIDRAFT_TRAINING_PACKAGES", str(request.getfixturevalue("packages")))
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

        def open_() -> Subject:
            subjects.append(Subject(case, *pairs(case), tmp_path / f"state{len(subjects)}"))
            return subjects[-1]

        return open_

    yield of
    for subject in subjects:
        subject.close()


# The checks


def check_text(open_: Open) -> None:
    """Greedy and sampled, while caches and adapters go from empty to something."""
    subject, accepted = open_(), 0.0
    for sampling in subject.case.samplings:
        for prompt in PROMPTS:
            expected, got = subject.plain(prompt, sampling), subject.ask(prompt, sampling)
            assert got.tokens == expected.tokens
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            accepted += got.counts["accepted"]
    if isinstance(subject.engine._proposer, Knowing):
        assert accepted > LENGTH, "the equality would be vacuous"
    if subject.learner is not None:
        assert subject.rounds_of_learning >= len(PROMPTS) and subject.learner.trainer_reason.startswith(
            subject.case.trainer
        )


def check_budget(open_: Open) -> None:
    """Exactly so many tokens, the beginning of the longer answer."""
    subject = open_()
    for sampling in subject.case.samplings:
        whole = subject.plain(PROMPTS[0], sampling)
        for budget in (1, 2, 3, 7, LENGTH - 1):
            got = subject.ask(PROMPTS[0], sampling, max_new_tokens=budget)
            assert got.tokens == whole.tokens[:budget]
            assert got.completion_tokens == min(budget, len(whole.tokens))
            assert got.finish_reason == ("length" if budget < len(whole.tokens) else whole.finish_reason)


def check_stops(open_: Open, folder: Path) -> None:
    """Stop strings of several tokens, which a round may cut anywhere, and stop ids, which may be proposed."""
    subject = open_()
    for sampling in subject.case.samplings:
        for prompt in PROMPTS:
            whole = subject.plain(prompt, sampling)
            for begin in range(2, max(3, len(whole.text) - 5), 7):
                stop = whole.text[begin : begin + 5]
                got = subject.ask(prompt, sampling, stop=[stop])
                assert got.text == whole.text[: whole.text.index(stop)]
                assert got.tokens == subject.plain(prompt, sampling, stop=[stop]).tokens
                assert got.finish_reason == "stop"
            stop_id = whole.tokens[len(whole.tokens) // 2]
            ending = subject.with_stop_ids([stop_id], folder)
            with closing(ending):
                got = ending.ask(prompt, sampling)
            assert got.tokens == whole.tokens[: whole.tokens.index(stop_id) + 1]
            assert got.finish_reason == "stop"


def check_rollback(open_: Open) -> None:
    """What is cut short is a beginning of the answer, and the next answers are as if it had never been."""
    subject = open_()
    for sampling in subject.case.samplings:
        expected = {prompt: subject.plain(prompt, sampling).tokens for prompt in PROMPTS}
        for cut in (1, 2, 5, 9):
            chunks = subject.chunks(PROMPTS[0], sampling, cut)
            report = subject.engine.report
            assert report is not None and report.finish_reason == "cancelled"
            verified = report.tokens
            assert [chunk.token for chunk in chunks] == verified[:cut] == expected[PROMPTS[0]][:cut]
            assert verified == expected[PROMPTS[0]][: len(verified)]
            for prompt in PROMPTS[:2]:
                assert subject.ask(prompt, sampling).tokens == expected[prompt]


def check_determinism(open_: Open) -> None:
    """The same questions in the same order: the same answers from the same proposals, unless time decides on those."""
    first, second = open_(), open_()
    for sampling in first.case.samplings:
        for prompt in PROMPTS:
            one, other = first.ask(prompt, sampling), second.ask(prompt, sampling)
            assert (one.tokens, one.text) == (other.tokens, other.text)
            if not first.case.options.measured and not first.case.trainer:
                assert one.counts == other.counts


def check_statistics(open_: Open) -> None:
    """What is counted in a round adds up to what is seen in the answer."""
    subject = open_()
    for sampling in subject.case.samplings:
        for prompt in PROMPTS:
            text = subject.plain(prompt, sampling).text
            for stop in ((), (text[len(text) // 2 :][:4],)):
                chunks = subject.chunks(prompt, sampling, stop=stop)
                report = subject.engine.report
                assert report is not None
                _adds_up(report, chunks)


def _adds_up(report: Report, chunks: Sequence[Chunk]) -> None:
    counts = report.counts
    assert report.tokens == [chunk.token for chunk in chunks] and report.text == "".join(c.text for c in chunks)
    assert counts["emitted"] == report.completion_tokens == len(chunks)
    assert counts["accepted"] == sum(chunk.from_draft for chunk in chunks) <= counts["proposed"]
    # Each pass gives one token of the target's own, but for the last, where an accepted one ended the text.
    assert counts["emitted"] == counts["accepted"] + counts["passes"] - chunks[-1].from_draft
    assert counts["rounds"] == counts["passes"] - 1
    assert counts["merges_accepted"] <= counts["merges"] and counts["lookups_accepted"] <= counts["lookups"]
    assert counts["merges"] + counts["lookups"] <= counts["proposed"]
    assert counts["merges_accepted"] + counts["lookups_accepted"] <= counts["accepted"]
    assert counts["translated"] <= counts["drawn"] + 1e-6
    assert len(report.predictions) <= counts["proposed"]
    assert sum(outcome for _, outcome in report.predictions) <= counts["accepted"]
    assert all(0 <= expected <= 1 for expected, _ in report.predictions)
    assert sum(report.phases.values()) == pytest.approx(report.seconds) and min(report.phases.values()) >= 0
    if report.drafted and counts["rounds"]:
        assert report.mean_draft_length == pytest.approx(counts["proposed"] / counts["rounds"])
    assert report.tokens_per_verify == pytest.approx(counts["emitted"] / counts["passes"])
    if counts["proposed"]:
        assert report.acceptance_rate == pytest.approx(counts["accepted"] / counts["proposed"])


# Every case, every check


@pytest.mark.parametrize("name", CASES)
def test_text_is_plain_text(opened: Callable[[Case], Open], name: str) -> None:
    check_text(opened(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_budgets_are_kept(opened: Callable[[Case], Open], name: str) -> None:
    check_budget(opened(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_stops_are_those_of_plain_text(opened: Callable[[Case], Open], name: str, tmp_path: Path) -> None:
    check_stops(opened(CASES[name]), tmp_path / "ending")


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_was_cut_short_leaves_nothing_behind(opened: Callable[[Case], Open], name: str) -> None:
    check_rollback(opened(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_the_same_questions_get_the_same_answers(opened: Callable[[Case], Open], name: str) -> None:
    check_determinism(opened(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_counts_add_up(opened: Callable[[Case], Open], name: str) -> None:
    check_statistics(opened(CASES[name]))


# Controls: broken parts are found out


def _believe(rows: np.ndarray, proposed: Sequence[int], *_: Any) -> Verdict:
    return Verdict([*proposed, int(rows[len(proposed)].argmax())], len(proposed))


def _rollback_one_less(self: Decoder, length: int) -> None:
    self.length = min(self.length, length + (length > 0))


def _count_twice(self: Tally, draft: Draft, accepted: int) -> None:
    _real_add(self, draft, 2 * accepted)


def _propose_one_more(self: Knowing, sampling: Sampling, position: int, limit: int) -> Draft:
    return _real_propose(self, sampling, position, limit + 1)


_real_add, _real_propose = Tally.add, Knowing.propose
ADVERSARY = CASES["proposer: adversary"]
BROKEN: dict[str, tuple[Case, Callable[[Open], None], Callable[[pytest.MonkeyPatch], object]]] = {
    "a verification that believes every proposal": (
        ADVERSARY, check_text, lambda patch: patch.setattr(generation, "verify", _believe)
    ),
    "a proposer that ignores its limit": (
        ADVERSARY, check_budget, lambda patch: patch.setattr(Knowing, "propose", _propose_one_more)
    ),
    "a decoder that keeps a row too many": (
        ADVERSARY, check_rollback, lambda patch: patch.setattr(Decoder, "rollback", _rollback_one_less)
    ),
    "a tally that counts twice": (ADVERSARY, check_statistics, lambda patch: patch.setattr(Tally, "add", _count_twice)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_is_found_out(opened: Callable[[Case], Open], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, check, break_ = BROKEN[name]
    open_ = opened(case)
    check(open_)
    break_(monkeypatch)
    with pytest.raises(AssertionError):
        check(open_)
