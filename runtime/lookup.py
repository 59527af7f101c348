"""Proposals that cost no model: the end of the text occurred before, and what followed it there may follow again.

Prompt look-up (Saxena 2023) that searches earlier answers too, and says how likely each proposal is: by the length of
the match, from what became of the ones before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Measured on 300 answers of SmolLM2-135M, rounds of up to 8 proposals: LEAST 2 gives 1.82 tokens per round, 3 gives
# 1.61, and more places than 8 give no more. What follows a match of 2 is right .41 of the time (.54 in the same text).
LEAST = 2  # tokens that must match
MOST_MATCH = 16  # a longer match counts as one of this length
MOST_PLACES = 8  # of one sequence of LEAST tokens: so many in the text, and so many in earlier answers
MOST_TOKENS = 65_536  # over all earlier answers
SHORTEST_ANSWER = 4  # tokens; a shorter one has hardly anything to follow a match

# Acceptance by length of the match before anything is counted: a straight line from FIRST to LAST. Measured: .4 to .95.
# It is pessimistic because a wrong proposal costs a row of the target.
FIRST, LAST = 0.35, 0.8
PRIOR_TRIALS = 4.0  # what the line counts for
FADE = 0.96  # per trial of the same length: one 50 trials ago counts for an eighth


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that may follow, and for each the probability that it is right if those before it are.

    `matched`: how many tokens at the end of the text occurred before them, at most MOST_MATCH; 0 if nothing was found.
    """

    tokens: list[int]
    expected: list[float]
    matched: int


class Shelf:
    """Answers in the order in which they were last given, each once, with at most `most_tokens` tokens in all."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._size = most_tokens, 0
        self._answers: dict[tuple[int, ...], list[int]] = {}

    @property
    def answers(self) -> list[list[int]]:
        """The answers, oldest first."""
        return list(self._answers.values())

    def put(self, answer: Sequence[int]) -> tuple[list[int] | None, list[list[int]]]:
        """One more answer: (it as it is kept, those that went to make room). The same one from before makes room too.

        One that is too short to be of use, or longer than the shelf, is not kept (None) and moves nothing.
        """
        if not SHORTEST_ANSWER <= len(answer) <= self._most:
            return None, []
        key = tuple(answer)
        same = self._answers.pop(key, None)
        gone = [] if same is None else [same]
        self._size += len(key) - sum(map(len, gone))
        while self._size > self._most:
            oldest = self._answers.pop(next(iter(self._answers)))
            self._size -= len(oldest)
            gone.append(oldest)
        kept = self._answers[key] = list(key)
        return kept, gone


class LookUp:
    """Looks for the longest end of the text that occurred before: in the text itself, or in an earlier answer.

    Text is target tokens, a prompt with its response so far. `find` before a round and `extend` after it cost tens of
    microseconds. Of equally long matches one in this text is preferred, and then the most recent one. A match lies
    within one text. Only the last MOST_PLACES places of each LEAST tokens are looked at.
    """

    def __init__(self, earlier: Iterable[Sequence[int]] = (), most_tokens: int = MOST_TOKENS) -> None:
        """`earlier`: answers of earlier responses, oldest first; `most_tokens`: how many of their tokens to keep."""
        self._text: list[int] = []
        self._here, self._before = _Places(), _Places()
        self._shelf = Shelf(most_tokens)
        self._rates = _Rates()
        self._last: Found | None = None
        for answer in earlier:
            self.remember(answer)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a response. The text of the one before is forgotten, unless it was remembered as an answer."""
        self._text, self._here, self._last = [], _Places(), None
        self.extend(prompt)

    def find(self, limit: int) -> Found:
        """Up to `limit` tokens that followed the longest match.

        Where they reach the end of this text they go on with themselves: a phrase of two tokens that is repeated is
        proposed as often as `limit` allows.
        """
        text, best, place = self._text, 0, None
        for places in (self._here, self._before):
            best, place = places.longest(text, best, place)
        if place is None or limit < 1:
            self._last = None
            return Found([], [], 0)
        source, start = place
        tokens = source[start : start + limit]
        if source is text:
            step = len(text) - start
            tokens += [tokens[i % step] for i in range(step, limit)]
        self._last = Found(tokens, [self.rate(best + i) for i in range(len(tokens))], best)
        return self._last

    def rate(self, length: int) -> float:
        """The probability that the next token is right behind a match of `length` tokens, LEAST at least."""
        return self._rates.of(min(length, MOST_MATCH))

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with what the target said, and count what became of the last `find`, whether or not it was used."""
        if self._last is not None:
            self._count(self._last, tokens)
            self._last = None
        text, here = self._text, self._here
        for token in tokens:
            here.add(text, len(text))
            text.append(token)

    def remember(self, answer: Sequence[int]) -> None:
        """Search one more earlier answer from now on; the oldest ones go where there are too many tokens."""
        kept, gone = self._shelf.put(answer)
        for old in gone:
            self._before.remove(old)
        if kept is not None:
            for end in range(LEAST, len(kept)):
                self._before.add(kept, end)

    def _count(self, found: Found, said: Sequence[int]) -> None:
        for i, (token, y) in enumerate(zip(found.tokens, said, strict=False)):
            self._rates.count(min(found.matched + i, MOST_MATCH), token == y)
            if token != y:  # what lies behind it followed another text
                break


class _Places:
    """Where LEAST tokens in a row were followed by another: (text, index of the one that followed), newest last."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}

    def add(self, text: list[int], end: int) -> None:
        """The tokens before `end` are to be found. Nothing happens where they are too few."""
        if end < LEAST:
            return
        places = self._of.setdefault(tuple(text[end - LEAST : end]), [])
        places.append((text, end))
        if len(places) > MOST_PLACES:
            del places[0]

    def remove(self, text: list[int]) -> None:
        """Forget every place in this very list."""
        for end in range(LEAST, len(text)):
            key = tuple(text[end - LEAST : end])
            left = [place for place in self._of.get(key, ()) if place[0] is not text]
            if left:
                self._of[key] = left
            else:
                self._of.pop(key, None)

    def longest(
        self, text: list[int], best: int, place: tuple[list[int], int] | None
    ) -> tuple[int, tuple[list[int], int] | None]:
        """The longest match of the end of `text` and its place, or those given if none is longer."""
        tail = text[: -MOST_MATCH - 1 : -1]  # the last token first
        for candidate in reversed(self._of.get(tuple(text[-LEAST:]), ())):
            if best == MOST_MATCH:
                break
            source, end = candidate
            length, most = LEAST, min(len(tail), end)
            while length < most and source[end - 1 - length] == tail[length]:
                length += 1
            if length > best:
                best, place = length, candidate
        return best, place


class _Rates:
    """How often the next token was right, by length of the match. Old trials fade, so that a change shows."""

    def __init__(self) -> None:
        self._tried = [0.0] * (MOST_MATCH + 1)
        self._right = [0.0] * (MOST_MATCH + 1)

    def of(self, length: int) -> float:
        prior = FIRST + (LAST - FIRST) * (length - LEAST) / (MOST_MATCH - LEAST)
        return (self._right[length] + PRIOR_TRIALS * prior) / (self._tried[length] + PRIOR_TRIALS)

    def count(self, length: int, right: bool) -> None:
        self._tried[length] = self._tried[length] * FADE + 1
        self._right[length] = self._right[length] * FADE + right
