"""Which draft tokens may stand for which target tokens, in the form that drafting needs."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from omnidraft.runtime.trie import MergeTrie
from omnidraft.runtime.vocabulary import VocabularyMap


class Kind(StrEnum):
    """How a proposed target token came from draft tokens."""

    DIRECT = "direct"
    MERGE = "merge"
    SPLIT = "split"
    LOOKUP = "look-up"  # from text that was there before, without draft tokens


class Mode(StrEnum):
    """What may be used to translate. The rows of the bench differ in this; users run FULL."""

    DIRECT = "direct"
    ONLINE = "direct + online cache"
    STATIC = "static map"
    FULL = "static map + online cache"

    @property
    def static(self) -> bool:
        """Whether merges and splits of the map computed at export are used."""
        return self in (Mode.STATIC, Mode.FULL)

    @property
    def online(self) -> bool:
        """Whether merges learned from verified text are used."""
        return self in (Mode.ONLINE, Mode.FULL)


class Translation:
    """A vocabulary map compiled for drafting.

    `pieces`: the target ids of each draft token; `direct` int64 [V_draft]: its twin, -1 without one;
    `merges`: those of the static map, spelling -> target; `trie`: the merges in use, which the online
    cache edits.
    """

    def __init__(self, vocabulary: VocabularyMap, mode: Mode = Mode.FULL, draft_size: int = 0) -> None:
        """`draft_size`: rows of the draft model, which may be more than its tokenizer has tokens."""
        longest = 1 if not mode.static else max(map(len, vocabulary.pieces), default=1)
        self.pieces = [p if len(p) <= longest else () for p in vocabulary.pieces]
        self.pieces += [()] * (draft_size - len(self.pieces))
        self.direct = np.array([p[0] if len(p) == 1 else -1 for p in self.pieces], np.int64)
        self.merges: dict[tuple[int, ...], int] = {}
        if mode.static:
            self.merges = {s: t for t, s in enumerate(vocabulary.spelling) if len(s) > 1}
        self.trie = MergeTrie(self.merges.items())

    def kind(self, draft: int) -> Kind:
        """Direct or split, for a draft token that has pieces."""
        return Kind.DIRECT if len(self.pieces[draft]) == 1 else Kind.SPLIT
