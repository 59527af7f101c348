"""Where earlier answers are kept: one document of the state folder, shared with other processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnidraft.runtime.bundle import Target
from omnidraft.runtime.lookup import MOST_TOKENS, Shelf
from omnidraft.runtime.pair import LoadedModel
from omnidraft.runtime.state import Key, Payload, State

SCHEMA = "omnidraft-answers/1"


class Answers:
    """The earlier answers of one target, for a `LookUp`.

    `relative` names the document, `key` the weights and the tokenizer of the target; `vocabulary` is the number of its
    token ids, which every id must fit. Without a state folder nothing is kept.
    """

    def __init__(self, state: State, relative: str, key: Key, vocabulary: int) -> None:
        self._state, self._relative, self._key, self._vocabulary = state, relative, key, vocabulary
        self._unsaved = Shelf()

    @classmethod
    def of(cls, state: State, target: LoadedModel[Target]) -> Answers:
        """Those of a loaded target."""
        info = target.info
        path = f"answers/{info.weights_sha256[:12]}-{info.tokenizer_sha256[:12]}.json"
        key: Key = {"target": info.weights_sha256, "tokenizer": info.tokenizer_sha256}
        return cls(state, path, key, target.decoder.vocabulary)

    @property
    def path(self) -> Path | None:
        """Where the document is, None if nothing is kept."""
        return None if self._state.folder is None else self._state.folder / self._relative

    def load(self) -> list[list[int]]:
        """The answers that the file has, oldest first; none where there is no file that can be used."""
        return self._checked(self._state.load(self._relative, SCHEMA, self._key)).answers

    def add(self, ids: Sequence[int]) -> None:
        """One more answer in target ids, for the next `save`. The same one from before is replaced by it.

        One below SHORTEST_ANSWER tokens or above MOST_TOKENS is not kept; nor is one with an id that the target does
        not have, and one line says so.
        """
        if self.path is None:
            return
        if not self._fits(ids):
            self._state.warn(f"{self.path}: an answer has ids outside the vocabulary of {self._vocabulary}, not kept")
            return
        self._unsaved.put([int(i) for i in ids])  # JSON has no numpy integers

    def save(self) -> None:
        """Put what was added since the last save behind what the file has by now; the oldest go where it gets full.

        If it cannot be written, one line says why, and the next save tries again with nothing lost.
        """
        if self._unsaved.answers and self._state.update(self._relative, SCHEMA, self._key, self._merged) is not None:
            self._unsaved = Shelf()

    def _merged(self, old: Payload | None) -> Payload:
        shelf = self._checked(old)
        for answer in self._unsaved.answers:
            shelf.put(answer)
        return {"answers": shelf.answers}

    def _checked(self, payload: Payload | None) -> Shelf:
        """The answers of a payload that passed the schema; one line says how many were dropped."""
        shelf = Shelf()
        found: list[list[int]] = [] if payload is None else payload["answers"]
        for answer in found:
            if self._fits(answer):
                shelf.put([int(i) for i in answer])  # the schema takes 5.0 for an integer
        dropped = len(found) - len(shelf.answers)
        if dropped:
            self._state.warn(
                f"{self.path}: {dropped} of {len(found)} answers dropped: ids outside the vocabulary of "
                f"{self._vocabulary}, the same answer twice, or more than {MOST_TOKENS} tokens in all"
            )
        return shelf

    def _fits(self, ids: Sequence[int]) -> bool:
        return all(0 <= i < self._vocabulary for i in ids)
