"""Validation: how many proposals a target would accept, from one pass of the drafter over its held-out answers.

The runtime's own rule for q̂ (`drafting.law` with the static map, greedy) is applied at the beginning of every target
token of a greedy answer, and the proposal is right if it is that token. Greedy decoding is lossless, so a run of the
engine would go through exactly these positions; `rate` walks through them as its rounds do. What may still differ:
the n-gram cache is empty here; behind draft tokens that the answer does not continue with, the pass has no logits, so
a merge that begins there is missed (it is wrong anyway, but could have taken mass from the right one); within a
round at k > 1 the runtime excludes what would have merged; and a target token that begins inside a draft token is
right inside a round if it was proposed as the next piece of that draft token, and wrong at the beginning of a round,
where the runtime spells the text so far anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnidraft.adapters.projection import starts
from omnidraft.runtime.drafting import choose, law
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.translation import Mode, Translation
from omnidraft.runtime.vocabulary import VocabularyMap
from omnidraft.tools.training.rows import Row
from omnidraft.tools.training.target import Target
from omnidraft.tools.training.tokenizer import encode_rows

ROWS_A_TASK = 32
LONGEST = 768  # draft tokens of a validation text
BATCH = 8
GREEDY = Sampling()
Hits = tuple[np.ndarray, np.ndarray]
"""Two bool [n]: is the proposal right where a round begins; is it right inside a round."""


class TeacherForced:
    """A DraftModel that knows the logits along one text only; elsewhere it is sure of token 0, which ends texts."""

    def __init__(self, rows: np.ndarray, text: np.ndarray) -> None:
        """rows float32 [m, V]: what the drafter says before each token of text [m]."""
        self._rows, self._text = rows, text
        self.room = LONGEST
        self._nothing = np.full(rows.shape[1], -1e9, np.float32)
        self._nothing[0] = 0.0

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        """See DraftModel."""
        on_text = len(path) < len(self._text) and tuple(self._text[: len(path)]) == path
        return self._rows[len(path)] if on_text else self._nothing


def hits(
    rows: np.ndarray, draft: np.ndarray, draft_starts: np.ndarray, target: np.ndarray, target_starts: np.ndarray,
    translation: Translation,
) -> Hits:  # fmt: skip
    """Whether the proposal at each target token is that token, if a round begins there and if it is inside a round.

    rows float32 [m, V_draft] are the logits before each of the draft tokens [m]; both spell one text, and `starts`
    are their bytes.
    """
    inside = np.zeros(len(target), bool)
    fresh = np.zeros(len(target), bool)
    first = np.searchsorted(draft_starts, target_starts)
    split: tuple[int, ...] = ()
    for i, (j, token) in enumerate(zip(first.tolist(), target.tolist(), strict=True)):
        if j == len(draft) or draft_starts[j] != target_starts[i]:
            inside[i], split = split[:1] == (token,), split[1:]
            continue
        q_hat = law(TeacherForced(rows[j:], draft[j:]), translation, (), 0.0)
        proposed = choose(q_hat, GREEDY, 0)
        fresh[i] = inside[i] = proposed == token
        spelled = q_hat.spelling.get(proposed, ())
        split = translation.pieces[spelled[0]][1:] if fresh[i] and len(spelled) == 1 else ()
    return fresh, inside


def rate(answers: Sequence[Hits], k: int) -> float:
    """Accepted / proposed of rounds with k proposals over the hits of each answer; its first token has no proposal."""
    accepted = proposed = 0
    for fresh, inside in answers:
        at = 1
        while at < len(fresh):
            limit = min(k, len(fresh) - at)
            right = [fresh[at], *inside[at + 1 : at + limit]]
            run = right.index(False) if False in right else limit
            accepted, proposed, at = accepted + run, proposed + limit, at + run + 1
    return accepted / max(proposed, 1)


class Validation:
    """Held-out greedy answers, by task."""

    def __init__(self, rows: Sequence[Row], target: Target, draft: TokenBytes, vocabulary: VocabularyMap) -> None:
        self._target, self._draft = target, draft
        self._translation = Translation(vocabulary, Mode.STATIC, draft.size)
        self._texts: dict[str, list[tuple[Row, list[int], list[int]]]] = {}
        prompts, answers = encode_rows(rows, draft)
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            group = self._texts.setdefault(row.task, [])
            if row.is_greedy and answer and len(prompt) < LONGEST // 2 and len(group) < ROWS_A_TASK:
                group.append((row, prompt, answer[: LONGEST - len(prompt)]))
        self._texts = {task: group for task, group in sorted(self._texts.items()) if group}
        if not self._texts:
            raise OmniDraftError("no held-out greedy answer is short enough to validate with; give more --prompts")

    @property
    def sizes(self) -> dict[str, int]:
        """Answers per task."""
        return {task: len(group) for task, group in self._texts.items()}

    def measure(self, model: Any, device: str) -> dict[str, dict[str, float]]:
        """Per task: predicted acceptance rate at k = 1 and 4, and the share of all positions that are right."""
        model.eval()
        figures = {}
        for task, group in self._texts.items():
            right = [
                hit for i in range(0, len(group), BATCH) for hit in self._hits(group[i : i + BATCH], model, device)
            ]
            figures[task] = {
                "k1": round(rate(right, 1), 4),
                "k4": round(rate(right, 4), 4),
                "positions": round(float(np.concatenate([inside for _, inside in right]).mean()), 4),
            }
        model.train()
        return figures

    def _hits(self, group: Sequence[tuple[Row, list[int], list[int]]], model: Any, device: str) -> list[Hits]:
        import torch

        ids = np.zeros((len(group), max(len(p) + len(a) for _, p, a in group)), np.int64)
        for line, (_, prompt, answer) in zip(ids, group, strict=True):
            line[: len(prompt) + len(answer)] = prompt + answer
        with torch.inference_mode():
            logits = model(torch.from_numpy(ids).to(device)).logits.float().cpu().numpy()
        found = []
        for rows, (row, prompt, answer) in zip(logits, group, strict=True):
            target = self._target.answer(row)
            draft_starts = starts([self._draft.bytes_of[d] for d in answer])
            target_starts = starts([self._target.tokens.bytes_of[t] for t in target])
            kept = target_starts <= draft_starts[-1]
            along = rows[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
            found.append(
                hits(
                    along,
                    np.array(answer),
                    draft_starts,
                    np.array(target)[kept],
                    target_starts[kept],
                    self._translation,
                )
            )
        return found
