"""The choice between drafter and look-up, and a drafter that rests and catches up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import NOWHERE, Loaded

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.policy import Fixed
from omnidraft.runtime.proposer import Choice
from omnidraft.runtime.report import Report
from omnidraft.runtime.sampling import Sampling

pytestmark = pytest.mark.model
REPEATED = "Say this again and again: the green bird sings, the green bird sings, the green bird sings, the green"


class Sometimes(Fixed):
    """Asks the drafter in every so many rounds."""

    def __init__(self, k: int, every: int) -> None:
        super().__init__(k)
        self._every, self._round = every, 0

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        super().opens(past, limit, found)
        self._round += 1
        return limit > 0 and self._round % self._every == 0


def engine(loaded: Loaded, draft: str = "4", every: int = 0) -> Engine:
    made = Engine(loaded.pair, Options(draft), NOWHERE, loaded.calibration)
    if every:
        assert isinstance(made._proposer, Choice)
        made._proposer._policy = made._proposer.drafter._policy = Sometimes(4, every)
    return made


def answer(engine: Engine, prompt: str, tokens: int = 40) -> Report:
    return engine.generate(prompt, sampling=Sampling(), max_new_tokens=tokens)


def test_a_drafter_that_rested_knows_what_was_said_meanwhile(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    """It reads the rounds that it missed in one pass; text and context are those of one that reads every round.

    Its n-grams are among those of the other, which also sees how a word was spelled that a round had not finished.
    """
    pair = loaded["int8"]
    always, now_and_then = engine(pair), engine(pair, every=5)
    for prompt in prompts[:3]:
        first, second = answer(always, prompt), answer(now_and_then, prompt)
        assert second.tokens == first.tokens
        assert 0 < second.counts["drawn"] < first.counts["drawn"] / 2, "it did not rest"
        contexts = [made._proposer.drafter._context.ids for made in (always, now_and_then)]  # type: ignore[union-attr]
        assert contexts[0] == contexts[1]
    seen = []
    for made in (always, now_and_then):
        assert made.cache is not None
        entries = made.cache.to_payload()["entries"]
        seen.append({(target, tuple(spelling)): count for target, spelling, count, *_ in entries if count})
    assert seen[1] and seen[1].items() <= seen[0].items()


def test_repeated_text_is_looked_up(loaded: dict[str, Loaded]) -> None:
    pair = loaded["int8"]
    with_lookup = Engine(pair.pair, Options("cost"), NOWHERE, pair.calibration)
    without = Engine(pair.pair, Options("cost", lookup=False), NOWHERE, pair.calibration)
    first, second = answer(with_lookup, REPEATED, 60), answer(without, REPEATED, 60)
    assert first.tokens == second.tokens
    assert first.counts["lookups"] > 0 == second.counts["lookups"]
    assert first.counts["lookups_accepted"] > first.counts["lookups"] / 2


def test_reports_say_how_long_drafts_were(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    report = answer(engine(loaded["int8"], "3"), prompts[0])
    assert report.mean_draft_length is not None and 2.5 < report.mean_draft_length <= 3
    assert len(report.predictions) <= report.counts["proposed"]
    assert sum(accepted for _, accepted in report.predictions) == report.counts["accepted"]
    assert all(0 < expected < 1 for expected, _ in report.predictions)
    plain = answer(engine(loaded["int8"], "off"), prompts[0])
    assert (plain.mean_draft_length, plain.predictions) == (None, [])


def test_one_answer_helps_the_next_where_answers_are_kept(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    """The same question again: the second answer is looked up in the first. Control: nothing is kept otherwise."""
    pair = loaded["int8"]
    for keep in (True, False):
        made = Engine(pair.pair, Options("cost"), NOWHERE, pair.calibration)
        if keep:
            made.keep_answers()
        first, second = answer(made, prompts[1]), answer(made, prompts[1])
        assert second.tokens == first.tokens
        assert (second.counts["lookups_accepted"] > 20) == keep
