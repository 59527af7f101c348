"""Look-up finds the longest match, as a plain search over all texts does, and knows how likely it is to be right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.runtime.lookup import (
    FIRST,
    LAST,
    LEAST,
    MOST_MATCH,
    MOST_PLACES,
    MOST_TOKENS,
    SHORTEST_ANSWER,
    LookUp,
    Shelf,
)

ROOM = 30  # tokens of earlier answers, few enough for some to go

few = st.lists(st.integers(0, 2), max_size=12)  # three tokens: everything occurs again
steps = st.lists(st.tuples(st.sampled_from(["begin", "extend", "extend", "remember"]), few), max_size=25)


def matched(text: Sequence[int], source: Sequence[int], end: int) -> int:
    """How many tokens before `end` are those at the end of `text`, at most MOST_MATCH."""
    lengths = range(min(MOST_MATCH, end, len(text)), 0, -1)
    return next((n for n in lengths if source[end - n : end] == text[len(text) - n :]), 0)


def searched(text: list[int], earlier: list[list[int]], limit: int) -> tuple[list[int], int, str]:
    """What `find` should say, from a search over every place; and where that was."""

    def places(source: list[int], name: str) -> list[tuple[list[int], int, str]]:
        ends = range(len(source) - 1, 0, -1)  # something must follow; the most recent first
        return [(source, end, name) for end in ends if matched(text, source, end) >= LEAST]

    candidates = places(text, "here")[:MOST_PLACES]
    candidates += [p for answer in reversed(earlier) for p in places(answer, "before")][:MOST_PLACES]
    if not candidates or limit < 1:
        return [], 0, "nowhere"
    source, end, name = max(candidates, key=lambda p: matched(text, p[0], p[1]))
    following = source[end:]
    while name == "here" and len(following) < limit:  # the text as it will be if the proposals are right
        following += following
    return following[:limit], matched(text, source, end), name


def put(answers: list[list[int]], answer: list[int], most: int) -> list[list[int]]:
    """The answers kept after one more."""
    if not SHORTEST_ANSWER <= len(answer) <= most:
        return answers
    kept = [old for old in answers if old != answer] + [answer]
    while sum(map(len, kept)) > most:
        kept = kept[1:]
    return kept


class Both:
    """A LookUp, and the texts that it was given."""

    def __init__(self) -> None:
        self.lookup = LookUp(most_tokens=ROOM)
        self.text: list[int] = []
        self.earlier: list[list[int]] = []

    def do(self, what: str, tokens: list[int]) -> None:
        getattr(self.lookup, what)(tokens)
        if what == "remember":
            self.earlier = put(self.earlier, tokens, ROOM)
        else:
            self.text = (self.text if what == "extend" else []) + tokens

    def same(self, limit: int) -> str:
        """Assert that both find the same; where it was."""
        tokens, length, name = searched(self.text, self.earlier, limit)
        found = self.lookup.find(limit)
        assert (found.tokens, found.matched) == (tokens, length), name
        assert found.expected == [self.lookup.rate(length + i) for i in range(len(tokens))]
        assert all(0 < a < 1 for a in found.expected)
        return name


@settings(max_examples=300)
@given(steps, st.integers(0, 6))
def test_what_is_found_is_what_a_search_over_every_place_finds(steps: list[tuple[str, list[int]]], limit: int) -> None:
    both = Both()
    for what, tokens in steps:
        both.do(what, tokens)
        both.same(limit)


def test_the_search_has_something_to_find() -> None:
    """The control of the test before: on such texts there are finds of every kind, and answers that go."""
    chance, both = random.Random(0), Both()
    kinds: Counter[str] = Counter()
    given = 0
    for _ in range(600):
        what = chance.choice(["begin", "extend", "extend", "remember"])
        tokens = [chance.randrange(4) for _ in range(chance.randrange(12))]
        given += what == "remember"
        both.do(what, tokens)
        kinds[both.same(4)] += 1
    assert min(kinds[name] for name in ("here", "before", "nowhere")) > 20
    assert given > 100 > 10 > len(both.earlier)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=MOST_PLACES), st.integers(0, 20))
def test_a_short_phrase_that_is_repeated_is_predicted_for_any_length(phrase: list[int], limit: int) -> None:
    lookup = LookUp()
    lookup.begin(phrase * (MOST_MATCH + 2))
    assert lookup.find(limit).tokens == (phrase * 20)[:limit]


@given(st.lists(st.integers(0, 500), unique=True, min_size=LEAST, max_size=60), st.data())
def test_a_phrase_that_begins_again_is_predicted_to_its_end(phrase: list[int], data: st.DataObject) -> None:
    begun = data.draw(st.integers(LEAST, len(phrase)))
    lookup = LookUp()
    lookup.begin([*phrase, 501, *phrase[:begun]])
    found = lookup.find(len(phrase) - begun + 1)
    assert found.tokens == [*phrase[begun:], 501] and found.matched == min(begun, MOST_MATCH)


@given(st.permutations(range(40)), st.integers(0, 40), st.integers(0, 40))
def test_nothing_is_found_where_nothing_is_repeated(tokens: list[int], first: int, second: int) -> None:
    first, second = sorted((first, second))
    lookup = LookUp([tokens[:first]])
    lookup.begin(tokens[first:second])
    lookup.extend(tokens[second:])
    assert lookup.find(8).tokens == [] and lookup.find(8).matched == 0


def found(prompt: list[int], *earlier: list[int], limit: int = 1) -> tuple[list[int], int]:
    lookup = LookUp(earlier)
    lookup.begin(prompt)
    what = lookup.find(limit)
    return what.tokens, what.matched


def test_the_longest_match_wins_then_this_text_then_the_most_recent() -> None:
    assert found([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]) == ([3], 3)  # longer, though older
    assert found([1, 2, 3, 8, 1, 2, 4, 7, 1, 2]) == ([4], 2)
    assert found([1, 2, 3, 8, 1, 2], [1, 2, 5, 6]) == ([3], 2)
    assert found([1, 2, 3, 9, 1, 2], [9, 1, 2, 5]) == ([5], 3)
    assert found([9, 1, 2], [1, 2, 3, 0], [1, 2, 4, 0]) == ([4], 2)
    assert found([9, 1, 2], [1, 2, 3, 0], [1, 2, 4, 0], [1, 2, 3, 0]) == ([3], 2)  # given again


def test_only_the_last_places_are_looked_at() -> None:
    longest = [9, 8, 1, 2, 3]
    assert found(longest + [1, 2, 4] * (MOST_PLACES - 1) + [9, 8, 1, 2]) == ([3], 4)
    assert found(longest + [1, 2, 4] * MOST_PLACES + [9, 8, 1, 2]) == ([4], 2)
    assert found([9, 8, 1, 2], longest, [1, 2, 4] * (MOST_PLACES - 1)) == ([3], 4)
    assert found([9, 8, 1, 2], longest, [1, 2, 4] * MOST_PLACES) == ([4], 2)


def test_a_match_and_what_follows_stay_within_one_text() -> None:
    earlier = [1, 2, 3, 4], [5, 6, 7, 8]
    assert found([4, 5], *earlier) == ([], 0)
    assert found([3, 4], *earlier) == ([], 0)  # nothing follows in that answer
    assert found([2, 3], *earlier, limit=5) == ([4], 2)
    assert found([8, 1, 2], *earlier, limit=5) == ([3, 4], 2)
    assert found([8, 9, 5, 6], *earlier, limit=5) == ([7, 8], 2)


def test_a_new_response_forgets_the_text_but_not_the_answers() -> None:
    lookup = LookUp([[1, 2, 3, 4]])
    lookup.begin([5, 6, 7, 8])
    lookup.begin([5, 6])
    assert lookup.find(1).tokens == []
    lookup.extend([1, 2])
    assert lookup.find(2).tokens == [3, 4]


@given(st.lists(few), st.integers(0, 40))
def test_a_shelf_keeps_the_newest_answers_each_once(answers: list[list[int]], most: int) -> None:
    shelf, kept = Shelf(most), []
    for answer in answers:
        before, kept = kept, put(kept, answer, most)
        own, gone = shelf.put(answer)
        assert shelf.answers == kept and sum(map(len, kept)) <= most
        assert (own is not None) == (SHORTEST_ANSWER <= len(answer) <= most)
        assert own is None or own is shelf.answers[-1]
        assert sorted([*kept, *gone]) == sorted([*before, *([] if own is None else [answer])])


def test_earlier_answers_are_bounded() -> None:
    size = MOST_TOKENS // 4
    answers = [list(range(n * size, (n + 1) * size)) for n in range(5)]
    lookup = LookUp(answers)
    for answer, there in zip(answers, (False, True, True, True, True), strict=True):
        lookup.begin(answer[:2])
        assert bool(lookup.find(1).tokens) == there
    lookup.remember(list(range(MOST_TOKENS + 1)))  # has no place, and takes none
    lookup.begin(answers[4][:2])
    assert lookup.find(1).tokens == [answers[4][2]]


# Rates


def trial(lookup: LookUp, right: bool) -> None:
    """One proposal after a match of LEAST tokens."""
    start = list(range(LEAST))
    lookup.begin([*start, 100, *start])
    assert lookup.find(1).tokens == [100] and lookup.find(1).matched == LEAST
    lookup.extend([100 if right else 101])


def test_before_anything_is_counted_longer_matches_are_trusted_more() -> None:
    rates = [LookUp().rate(n) for n in range(LEAST, MOST_MATCH + 1)]
    assert rates == sorted(set(rates)) and rates[0] == FIRST and rates[-1] == pytest.approx(LAST)
    assert LookUp().rate(MOST_MATCH + 9) == rates[-1]


@given(st.lists(st.booleans(), max_size=80), st.booleans())
def test_a_rate_grows_with_what_is_right_and_falls_with_what_is_wrong(history: list[bool], right: bool) -> None:
    lookup = LookUp()
    for was_right in history:
        trial(lookup, was_right)
    before = lookup.rate(LEAST)
    trial(lookup, right)
    assert 0 < lookup.rate(LEAST) < 1
    assert (lookup.rate(LEAST) > before) == right
    assert lookup.rate(LEAST + 1) == LookUp().rate(LEAST + 1)  # no match was of that length


def test_a_rate_comes_near_what_happens_and_a_change_shows_within_fifty_trials() -> None:
    lookup, chance = LookUp(), random.Random(0)
    for _ in range(300):
        trial(lookup, chance.random() < 0.7)
    assert lookup.rate(LEAST) == pytest.approx(0.65, abs=0.15)  # of some 25 trials, and the prior
    for right, bounds in ((True, (0.85, 1)), (False, (0, 0.2)), (True, (0.75, 1))):
        for _ in range(50):
            trial(lookup, right)
        assert bounds[0] < lookup.rate(LEAST) < bounds[1]


def counted(said: list[int], limit: int = 4) -> list[str]:
    """What a round that says `said` changes in the rates of the four proposals 3, 4, 5, 6."""
    lookup = LookUp()
    lookup.begin([1, 2, 3, 4, 5, 6, 1, 2])
    before = lookup.find(limit).expected
    assert lookup.find(limit).tokens == [3, 4, 5, 6][:limit]
    lookup.extend(said)
    lookup.extend([3, 4, 5, 6])  # counts nothing: there was no find before it
    after = [lookup.rate(2 + i) for i in range(len(before))]
    return ["right" if b > a else "wrong" if b < a else "" for a, b in zip(before, after, strict=True)]


def test_a_proposal_counts_up_to_the_first_that_is_wrong_and_where_it_was_decided() -> None:
    assert counted([3, 4, 5, 6, 7]) == ["right"] * 4
    assert counted([3, 9]) == ["right", "wrong", "", ""]
    assert counted([9, 4, 5]) == ["wrong", "", "", ""]  # right again, but after another text
    assert counted([3, 4]) == ["right", "right", "", ""]  # the end of the response
    assert counted([3, 4, 5], limit=1) == ["right"]
    assert counted([]) == [""] * 4


def test_only_the_last_find_counts_and_only_in_its_own_response() -> None:
    lookup = LookUp()
    lookup.begin([1, 2, 3, 1, 2])
    lookup.find(1)
    assert lookup.find(0).tokens == []
    lookup.extend([3])
    assert lookup.find(1).tokens == [1]
    lookup.begin([1, 2, 1, 1])  # its first token is what was found
    assert [lookup.rate(n) for n in range(LEAST, MOST_MATCH)] == [LookUp().rate(n) for n in range(LEAST, MOST_MATCH)]


def test_long_copies_are_expected_to_go_on() -> None:
    """A text copied from the prompt: the expectation rises along the copy and, with what was right, towards one."""
    prompt = list(range(1000))
    lookup = LookUp()
    lookup.begin([*prompt, *prompt[:LEAST]])
    first = lookup.find(8).expected
    assert first == sorted(first)
    for start in range(LEAST, 990, 8):
        assert lookup.find(8).tokens == prompt[start : start + 8]
        lookup.extend(prompt[start : start + 8])
    assert lookup.find(8).expected[0] > 0.95 > first[0]
