"""The drafter's context: the target's text in draft tokens, spelled as the drafter's tokenizer would.

A drafter was trained on its tokenizer's own spelling, and guesses worse behind another one. So the
tail since the last safe boundary is spelled anew whenever text is committed, and the KV rows of
the common beginning are kept: the cost is that of the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnidraft.runtime.causal_model import CausalModel, held
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes

LONGEST_TAIL = 96  # bytes that are spelled anew where no boundary is found (scripts without spaces)
SPACES = b" \n\t\r"


class DraftContext:
    """Holds the committed text for a drafter, and answers with logits behind it (a DraftModel).

    Rows that the drafter holds of an earlier response stay where the text begins as it did.
    """

    def __init__(self, decoder: CausalModel, tokens: TokenBytes, limit: int, prefix: Sequence[int]) -> None:
        """`prefix`: draft ids that are never respelled (the rendered prompt); `limit`: the drafter's positions."""
        self._decoder, self._tokens, self._limit = decoder, tokens, limit
        decoder.reserve(limit)
        self._ids = list(prefix) or [0]
        decoder.rollback(held(decoder, self._ids))
        self._tail_start = len(self._ids)  # index in ids; everything before it is settled
        self._tail = b""
        self._rows: dict[tuple[int, ...], np.ndarray] = {}
        self._hidden: dict[tuple[int, ...], np.ndarray] = {}
        self._slide()

    @property
    def ids(self) -> list[int]:
        """The context in draft tokens (a copy)."""
        return list(self._ids)

    @property
    def room(self) -> int:
        """The longest path behind the context that the drafter's window holds."""
        return self._limit - len(self._ids)

    def commit(self, pieces: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Append the bytes of newly emitted target tokens; the rows of `logits` are void afterwards.

        Returns, for each piece, the draft ids that spell it in this context, () where its borders
        are not borders of draft tokens (OmniDraft, Algorithm 1, steps 17-19).
        """
        begin = len(self._tail)
        try:
            spelled = self._tokens.encode(self._tail + b"".join(pieces))
        except OmniDraftError:  # bytes that the drafter has no tokens for: it does not get to see them
            return [()] * len(pieces)
        self._tail += b"".join(pieces)
        self._ids[self._tail_start :] = spelled
        self._rows.clear()
        self._hidden.clear()
        self._forget_respelled()
        ends = [0]
        for token in spelled:
            ends.append(ends[-1] + len(self._tokens.bytes_of[token] or b""))
        index = {end: i for i, end in enumerate(ends)}
        found, at = [], begin
        for piece in pieces:
            first, last = index.get(at), index.get(at + len(piece))
            found.append(() if first is None or last is None else tuple(spelled[first:last]))
            at += len(piece)
        self._settle(ends)
        self._slide()
        return found

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        """Next-token logits float32 [V] behind the context and `path`; runs the drafter where it must."""
        row = self._rows.get(path)
        if row is None:
            wanted = [*self._ids, *path]
            keep = self._common(wanted)
            self._decoder.rollback(keep)
            out = self._decoder.run(wanted[keep:])
            row = self._rows[path] = out[-1].copy()
            if self._decoder.hidden is not None:
                self._hidden[path] = self._decoder.hidden[-1].copy()
        return row

    def hidden(self, path: tuple[int, ...]) -> np.ndarray | None:
        """The last hidden state float32 [H] of a row that `logits` gave; None if the graph has no such output."""
        return self._hidden.get(path)

    def _common(self, wanted: list[int]) -> int:
        """How many fed tokens can stay; the last wanted one is always fed again for its logits."""
        most, fed = min(self._decoder.length, len(wanted) - 1), self._decoder.fed
        for i in range(min(len(self._ids), most), most):  # up to there, `_forget_respelled` has compared
            if fed[i] != wanted[i]:
                return i
        return most

    def _forget_respelled(self) -> None:
        """Drop fed tokens from the first one on that the tail now spells otherwise."""
        fed = self._decoder.fed
        for i in range(self._tail_start, min(self._decoder.length, len(self._ids))):
            if fed[i] != self._ids[i]:
                self._decoder.rollback(i)
                break

    def _settle(self, ends: list[int]) -> None:
        """Move the tail to the last boundary: a space behind a non-space, at a border of draft tokens."""
        tail, bound = self._tail, 0
        for i in range(len(ends) - 2, 0, -1):
            at = ends[i]
            if tail[at] == 0x20 and tail[at - 1] not in SPACES:
                bound = i
                break
        if bound == 0 and len(tail) > LONGEST_TAIL:
            bound = max(i for i, at in enumerate(ends) if at <= len(tail) - LONGEST_TAIL // 2)
        self._tail = tail[ends[bound] :]
        self._tail_start += bound

    def _slide(self) -> None:
        """Keep the last half of the window once it is nearly full: drafts need room too."""
        room = min(64, self._limit // 4)
        if len(self._ids) > self._limit - room:
            drop = min(len(self._ids) - self._limit // 2, self._tail_start)
            del self._ids[:drop]
            self._tail_start -= drop
            self._decoder.rollback(0)
            self._rows.clear()
            self._hidden.clear()
