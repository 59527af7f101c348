"""A drafter and a target small enough to know their laws exactly, with nested n-grams and shared heads."""

from __future__ import annotations

import hashlib

import numpy as np

from omnidraft.runtime import paper
from omnidraft.runtime.drafting import draft
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.translation import Mode, Translation
from omnidraft.runtime.verification import verify
from omnidraft.runtime.vocabulary import VocabularyMap


class Toy:
    """Draft vocabulary and target vocabulary are texts; logits come from what stands before."""

    def __init__(self, drafts: list[str], targets: list[str], q: dict[str, list[float]], p: list[float] | None) -> None:
        self.drafts, self.targets, self._q, self._p = drafts, targets, q, p
        spelling = [self._spell(t) for t in targets]
        pieces = [(targets.index(d),) if d in targets else () for d in drafts]
        self.translation = Translation(VocabularyMap(pieces, spelling), Mode.FULL)

    def _spell(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        while text:
            longest = max((d for d in self.drafts if text.startswith(d)), key=len)
            ids.append(self.drafts.index(longest))
            text = text[len(longest) :]
        return tuple(ids)

    def draft_logits(self, text: str) -> np.ndarray:
        if text in self._q:
            return np.log(np.array(self._q[text], np.float32))
        return _random(f"q{text}", len(self.drafts))

    def target_logits(self, text: str) -> np.ndarray:
        if self._p is not None:
            return np.log(np.array(self._p, np.float32))
        return _random(f"p{text}", len(self.targets))

    def p(self, text: str, temperature: float) -> np.ndarray:
        scaled = self.target_logits(text).astype(float) / temperature
        weights = np.exp(scaled - scaled.max())
        return weights / weights.sum()

    def round(self, history: list[int], k: int, sampling: Sampling, rule: str) -> list[int]:
        """The tokens that one speculative round emits behind `history`."""
        text = "".join(self.targets[t] for t in history)
        model = Behind(self, text)
        position = len(history)
        if rule == "paper":
            proposed = paper.propose(model, self.translation, sampling, position, k, (), len(self.targets))
        else:
            proposed = draft(model, self.translation, sampling, position, k, ())
        rows = [self.target_logits(text)]
        for token in proposed.tokens:
            text += self.targets[token]
            rows.append(self.target_logits(text))
        if rule == "paper":
            return paper.verify(np.array(rows), proposed, history, sampling, position).tokens
        return verify(np.array(rows), proposed.tokens, history, sampling, position).tokens

    def generate(self, length: int, k: int, sampling: Sampling, rule: str = "coupled") -> list[int]:
        """The first `length` tokens, in rounds of k proposals (0: plain decoding)."""
        out: list[int] = []
        while len(out) < length:
            out += self.round(out, k, sampling, rule)
        return out[:length]


class Behind:
    """The toy's drafter behind a text."""

    room = 1000

    def __init__(self, toy: Toy, text: str) -> None:
        self.toy, self.text = toy, text

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        return self.toy.draft_logits(self.text + "".join(self.toy.drafts[d] for d in path))


def _random(name: str, size: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return (np.random.default_rng(seed).normal(size=size) * 1.5).astype(np.float32)


def worked_example() -> Toy:
    """The counter-example of DESIGN.md section 4: one position, one n-gram f·la -> fla."""
    q = {"": [0.6, 0.1, 0.3], "f": [0.05, 0.9, 0.05]}
    return Toy(["f", "la", "g"], ["f", "la", "g", "fla"], q, [0.1, 0.1, 0.3, 0.5])


def nested() -> Toy:
    """Random laws behind every text; merges that share a head and contain each other."""
    return Toy(["a", "b", "c"], ["a", "b", "c", "ab", "abc", "ac", "ca"], {}, None)
