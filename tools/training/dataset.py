"""Training text as one array of draft tokens with soft labels; a batch is a function of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import numpy as np

from omnidraft.adapters.projection import project, spelling_table, starts
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap
from omnidraft.tools.training.rows import Row
from omnidraft.tools.training.target import Target
from omnidraft.tools.training.teacher import TOP, Teacher
from omnidraft.tools.training.tokenizer import encode_rows

REPEAT = 3  # how often an epoch sees what the target itself wrote


@dataclass(frozen=True)
class Dataset:
    """Documents one after the other.

    ids int32 [T]; begins int64 [D + 1]: where each document begins, with the end; repeats int64 [D]; soft int32 [T]:
    the row of soft_ids, soft_p [S, K] that says what a token should have been, -1 for none.
    """

    ids: np.ndarray
    begins: np.ndarray
    repeats: np.ndarray
    soft: np.ndarray
    soft_ids: np.ndarray
    soft_p: np.ndarray

    @property
    def epoch(self) -> int:
        """Tokens of an epoch."""
        return int((np.diff(self.begins) * self.repeats).sum())

    @property
    def fingerprint(self) -> str:
        """Changes if the text, its order, its spelling or its soft labels do."""
        parts = (self.ids, self.begins, self.repeats, self.soft, self.soft_ids, self.soft_p)
        return sha256(b"".join(sha256(part.tobytes()).digest() for part in parts)).hexdigest()


def build(rows: Sequence[Row], draft: TokenBytes, soft: SoftLabels | None) -> Dataset:
    """Spell the rows in draft tokens; `soft` None: hard labels only."""
    prompts, answers = encode_rows(rows, draft)
    documents = [np.array(p + a, np.int32) for p, a in zip(prompts, answers, strict=True)]
    begins = np.cumsum([0, *map(len, documents)])
    labels = np.full(begins[-1], -1, np.int32)
    ids: list[np.ndarray] = [np.empty((0, TOP), np.int32)]
    p: list[np.ndarray] = [np.empty((0, TOP), np.float16)]
    count = 0
    for row, prompt, answer, begin in zip(rows, prompts, answers, begins, strict=False):
        if soft is None or row.temperature is None:  # what the target did not write is read for its words alone
            continue
        where, found, weights = soft.of(row, answer)
        labels[begin + len(prompt) + where] = count + np.arange(len(where))
        count += len(where)
        ids.append(found.astype(np.int32))
        p.append(weights.astype(np.float16))
    repeats = np.array([1 if row.temperature is None else REPEAT for row in rows])
    return Dataset(np.concatenate(documents), begins, repeats, labels, np.concatenate(ids), np.concatenate(p))


class SoftLabels:
    """Projects what a teacher says about a row."""

    def __init__(self, teacher: Teacher, target: Target, draft: TokenBytes, vocabulary: VocabularyMap) -> None:
        self._teacher, self._target, self._draft = teacher, target, draft
        self._table = spelling_table(vocabulary.spelling, max(target.source.vocabulary, len(vocabulary.spelling)))

    def of(self, row: Row, answer: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `project`, for the answer in draft ids; always TOP columns."""
        top, target = self._teacher.top(row), self._target.answer(row)
        where, ids, p, _ = project(
            top.ids, top.p,
            np.array(target), starts([self._target.tokens.bytes_of[t] for t in target]),
            np.array(answer), starts([self._draft.bytes_of[d] for d in answer]),
            self._table,
        )  # fmt: skip
        missing = ((0, 0), (0, TOP - ids.shape[1]))
        return where, np.pad(ids, missing), np.pad(p, missing)


class Batches:
    """Packed rows of an endless shuffle. Which tokens a step sees depends on the seed and the step only."""

    def __init__(self, data: Dataset, rows: int, length: int, seed: int) -> None:
        self._data, self._rows, self._length, self._seed = data, rows, length, seed
        self.an_epoch = max(1, data.epoch // (rows * length))
        self._pack = lru_cache(maxsize=1)(self._packed)

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, soft) of a step, int32 [rows, length] each; see Dataset."""
        epoch, place = divmod(step, self.an_epoch)
        index = self._pack(epoch)[place * self._rows : (place + 1) * self._rows]
        return self._data.ids[index], self._data.soft[index]

    def _packed(self, epoch: int) -> np.ndarray:
        """int64 [rows of the epoch, length]: indices into the text; a text too short for one batch is repeated."""
        rng = np.random.default_rng([self._seed, epoch])
        data = self._data
        order = rng.permutation(np.repeat(np.arange(len(data.repeats)), data.repeats))
        flat = np.concatenate([np.arange(data.begins[d], data.begins[d + 1]) for d in order])
        wanted = self.an_epoch * self._rows * self._length
        return np.resize(flat, wanted).reshape(-1, self._length)[rng.permutation(self.an_epoch * self._rows)]
