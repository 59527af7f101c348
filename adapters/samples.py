"""Samples: an observed response in draft tokens, beside what the target said. They do not depend on the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.projection import spelling_table, starts
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.observation import TOP, Observation
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap

PREFIX, ANSWER = 256, 256  # most draft tokens of context, and most target tokens, of one sample
FAR = -1e9


@dataclass(frozen=True)
class Sample:
    """Part of a response.

    draft int32 [T]: context and answer in draft tokens, the answer from `begin` on; target int32 [n]: the answer in
    target tokens; top_ids int32 and top_p float16 [n, TOP]: what the target found likely there, 0 where less.
    """

    draft: NDArray[np.int32]
    begin: int
    target: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_p: NDArray[np.float16]

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return sum(part.nbytes for part in (self.draft, self.target, self.top_ids, self.top_p))


class Spelling:
    """Both vocabularies of a pair.

    `spelling`: target id -> the draft ids that spell it; `table`: the same as an array; `twin` int64 [V_target]: the
    draft token with the same bytes, -1 without one.
    """

    def __init__(
        self, draft: TokenBytes, target: TokenBytes, vocabulary: VocabularyMap, draft_size: int,
        positions: int | None = None,
    ) -> None:  # fmt: skip
        """`draft_size`: rows of the draft model's output; `positions`: tokens that it can read, None for any number."""
        self._draft, self._target, self.spelling = draft, target, vocabulary.spelling
        self._positions = positions
        self.table = spelling_table(vocabulary.spelling, len(target.bytes_of))
        self.twin = np.full(len(target.bytes_of), -1, np.int64)
        for t, spelled in enumerate(vocabulary.spelling):
            if len(spelled) == 1:
                self.twin[t] = spelled[0]
        self.unmapped = np.full(draft_size, FAR, np.float32)
        """float32 [V]: 0 for draft tokens that are the twin of a target token, far below for others."""
        self.unmapped[self.twin[self.twin >= 0]] = 0

    @classmethod
    def of(cls, pair: Pair) -> Spelling:
        """That of a loaded pair, which must have a drafter."""
        assert pair.drafter is not None and pair.vocabulary is not None
        draft = pair.drafter
        return cls(draft.tokens, pair.target.tokens, pair.vocabulary, draft.decoder.vocabulary, draft.info.context)

    def samples(self, observation: Observation) -> Iterator[Sample]:
        """The response in pieces of up to ANSWER tokens; text that the drafter has no tokens for ends it.

        A piece that the drafter has no token for, or that is longer than what it can read, is left out.
        """
        try:
            context = [*(observation.prefix or [0]), *self._draft.encode(observation.text)]
            for begin in range(0, len(observation.tokens), ANSWER):
                target = observation.tokens[begin : begin + ANSWER]
                answer = self._encode(target)
                room = PREFIX if self._positions is None else min(PREFIX, self._positions - len(answer))
                if answer and room > 0:
                    context = context[-room:]
                    yield _sample(context, answer, target, observation.tops[begin : begin + ANSWER])
                context += answer
        except OmniDraftError:
            return

    def starts(self, sample: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The byte at which each draft token and each target token of the answer begins."""
        pairs = ((sample.draft[sample.begin :], self._draft), (sample.target, self._target))
        draft, target = (starts([tokens.bytes_of[i] for i in ids.tolist()]) for ids, tokens in pairs)
        return draft, target

    def _encode(self, target: Sequence[int]) -> list[int]:
        """Draft ids of target tokens; a special one at the end by its role. Raises OmniDraftError as `encode`."""
        pieces = [self._target.bytes_of[t] for t in target]
        spoken = self._draft.encode(b"".join(piece or b"" for piece in pieces))
        return spoken if pieces[-1] is not None else [*spoken, *self.spelling[target[-1]]]


def _sample(
    context: Sequence[int],
    answer: Sequence[int],
    target: Sequence[int],
    tops: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]],
) -> Sample:
    ids, p = np.zeros((len(target), TOP), np.int32), np.zeros((len(target), TOP), np.float16)
    for row, (top_ids, top_p) in enumerate(tops):
        ids[row, : len(top_ids)] = top_ids
        p[row, : len(top_ids)] = top_p
    return Sample(np.array([*context, *answer], np.int32), len(context), np.array(target, np.int32), ids, p)
