"""The online n-gram cache: which draft n-grams spell which target tokens, learned from verified text.

OmniDraft (arXiv 2507.02659), Algorithm 1, steps 17-19, with what the paper lacks: a bound with LFU eviction, switching
off of merges that lose, and merging of what several processes learned.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

Spelling = tuple[int, ...]

SCHEMA = "omnidraft-ngram-cache/1"
COUNTS = ["seen", "proposed", "accepted", "forgotten_accepted", "forgotten_missed", "seen_since_off"]
COLUMNS = ["target", "spelling", *COUNTS]
MAX_SPELLING = 64
MAX_COUNT = 10**12

# A merge takes the place of the plain token at the head of its n-gram, which the target accepts more often than one
# time in five, so a merge below that loses. Tries within one answer are alike (the same phrase again), which the
# interval does not know: hence a minimum count beyond the 16 misses that would satisfy it.
OFF_BELOW = 0.2
MIN_TRIES = 20
# The target writing the token again and again is the evidence that the merge is worth another trial. Half of the old
# tries still count then, so a merge that goes on losing is off again after half as many.
RETRY_SEEN = 8


@dataclass(slots=True)
class Entry:
    """One pair (target token, draft n-gram). All counts but the last only grow, so two processes can add theirs up.

    `seen`: times in verified text; `proposed`, `accepted`: as a merge; `forgotten_*`: the tries that judging leaves
    out; `seen_since_off`: None while in use; `saved`: (seen, proposed, accepted) at the last load or save.
    """

    target: int
    spelling: Spelling
    seen: int = 0
    proposed: int = 0
    accepted: int = 0
    forgotten_accepted: int = 0
    forgotten_missed: int = 0
    seen_since_off: int | None = None
    saved: tuple[int, int, int] = (0, 0, 0)
    used: int = 0

    @property
    def off(self) -> bool:
        """Whether the merge lost too often and is not proposed for the time being."""
        return self.seen_since_off is not None

    @property
    def rank(self) -> tuple[int, int]:
        """What eviction compares: frequency, then time of last use. It only grows."""
        return self.seen + self.accepted, self.used

    @property
    def judged(self) -> tuple[int, int]:
        """Accepted and missed tries that still count."""
        missed = self.proposed - self.accepted
        return self.accepted - self.forgotten_accepted, missed - self.forgotten_missed

    @property
    def counts(self) -> tuple[int, int, int]:
        """Seen, proposed, accepted."""
        return self.seen, self.proposed, self.accepted

    def row(self) -> list[Any]:
        """The entry as the file has it."""
        judging = self.forgotten_accepted, self.forgotten_missed, self.seen_since_off
        return [self.target, list(self.spelling), *(min(n, MAX_COUNT) for n in self.counts), *judging]


def wilson_upper(successes: int, tries: int) -> float:
    """Upper end of Wilson's 95 % interval for a proportion (Wilson 1927). `tries` > 0."""
    z2 = 1.959964**2
    p = successes / tries
    return (p + z2 / (2 * tries) + sqrt(z2 * (p * (1 - p) / tries + z2 / (4 * tries * tries)))) / (1 + z2 / tries)


class NgramCache:
    """The cache of one (drafter, target) pair, at most `capacity` entries; the least frequent one is evicted.

    `static`: spelling -> target of the merges computed at export, which are in use unless the cache knows better.
    Entries with more than MAX_SPELLING draft tokens are not kept: no drafter would draft so many for one proposal.
    """

    def __init__(self, capacity: int = 4096, static: Mapping[Spelling, int] | None = None) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self._static: Mapping[Spelling, int] = static or {}
        self._told: dict[Spelling, int | None] = {}  # what take_changes has said, where it differs from static
        self._touched: dict[Spelling, None] = {}
        self._clear()

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def entries(self) -> dict[Spelling, Entry]:
        """The entry of each spelling; of several targets the one in use, else the one most often seen."""
        return {spelling: min(pairs, key=lambda e: (e.off, -e.seen)) for spelling, pairs in self._spelled.items()}

    @property
    def unsaved(self) -> bool:
        """Whether there is something to save."""
        return any(entry.counts != entry.saved for entry in self._pairs.values())

    def observe(self, target: int, spelling: Spelling) -> None:
        """Count one instance in verified text: `target` stood where the drafter's tokens would be `spelling`."""
        entry = self._entry(target, spelling)
        if entry is None:
            return
        entry.seen += 1
        if entry.seen_since_off is not None:
            entry.seen_since_off += 1
            if entry.seen_since_off >= RETRY_SEEN:
                entry.seen_since_off = None
                judged, missed = entry.judged
                entry.forgotten_accepted += judged // 2
                entry.forgotten_missed += (missed + 1) // 2
        self._touched[spelling] = None

    def record(self, target: int, spelling: Spelling, accepted: bool) -> None:
        """Count one proposal of `target` by this merge, whether the cache or the static map had it."""
        entry = self._entry(target, spelling)
        if entry is None:
            return
        entry.proposed += 1
        entry.accepted += accepted
        if not accepted and not entry.off:
            judged, missed = entry.judged
            tries = judged + missed
            if tries >= MIN_TRIES and wilson_upper(judged, tries) < OFF_BELOW:
                entry.seen_since_off = 0
        self._touched[spelling] = None

    def take_changes(self) -> list[tuple[Spelling, int | None]]:
        """What the trie must now set (a target) or remove (None), since the last call."""
        changes: list[tuple[Spelling, int | None]] = []
        for spelling in self._touched:
            wanted, static = self._wanted(spelling), self._static.get(spelling)
            if wanted == self._told.get(spelling, static):
                continue
            changes.append((spelling, wanted))
            if wanted == static:
                del self._told[spelling]
            else:
                self._told[spelling] = wanted
        self._touched.clear()
        return changes

    def to_payload(self) -> dict[str, Any]:
        """Everything, for a file of its own."""
        return _payload(sorted(self._pairs.values(), key=lambda e: e.used), self.capacity)

    def merged(self, payload: dict[str, Any] | None) -> dict[str, Any]:
        """The payload of a file, with what was counted here since the last load or save added to it.

        Changes nothing here: call `adopt` with the result once it is safely written.
        """
        pairs = {(e.target, e.spelling): e for e in _entries(payload)}
        for mine in sorted(self._pairs.values(), key=lambda e: e.used):
            if mine.counts == mine.saved:
                continue
            entry = pairs.pop((mine.target, mine.spelling), None) or Entry(mine.target, mine.spelling)
            entry.seen += mine.seen - mine.saved[0]
            entry.proposed += mine.proposed - mine.saved[1]
            entry.accepted += mine.accepted - mine.saved[2]
            _judge_as_later(entry, mine)
            pairs[mine.target, mine.spelling] = entry
        return _payload(pairs.values(), self.capacity)

    def adopt(self, payload: dict[str, Any] | None) -> None:
        """Become what a file says, as after a save: it holds all that was here, and what others added."""
        self._touched.update(dict.fromkeys(self._spelled))
        self._clear()
        for entry in _most_frequent(_entries(payload), self.capacity):
            entry.saved = entry.counts
            self._insert(entry)
        self._touched.update(dict.fromkeys(self._spelled))

    @classmethod
    def from_payload(
        cls, payload: dict[str, Any] | None, capacity: int = 4096, static: Mapping[Spelling, int] | None = None
    ) -> NgramCache:
        """A cache that starts from a (validated) payload. The first `take_changes` tells all of it."""
        cache = cls(capacity, static)
        cache.adopt(payload)
        return cache

    def _clear(self) -> None:
        self._clock = 0
        self._pairs: dict[tuple[int, Spelling], Entry] = {}
        self._spelled: dict[Spelling, list[Entry]] = {}
        self._queue: list[tuple[tuple[int, int], int, Spelling]] = []  # one item per entry, its rank may be outdated

    def _entry(self, target: int, spelling: Spelling) -> Entry | None:
        entry = self._pairs.get((target, spelling))
        if entry is not None:
            self._clock += 1
            entry.used = self._clock
            return entry
        if len(spelling) < 2:
            raise ValueError("a merge has at least two draft tokens")
        if len(spelling) > MAX_SPELLING:
            return None
        if len(self._pairs) >= self.capacity:
            self._evict()
        entry = Entry(target, spelling)
        self._insert(entry)
        return entry

    def _insert(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock
        self._pairs[entry.target, entry.spelling] = entry
        self._spelled.setdefault(entry.spelling, []).append(entry)
        heapq.heappush(self._queue, (entry.rank, entry.target, entry.spelling))

    def _evict(self) -> None:
        # Ranks only grow, so an item whose rank is up to date is the least of all. Each outdated one met on the way
        # pays for calls since it was queued: O(log n) per call, amortised.
        while True:
            rank, target, spelling = self._queue[0]
            entry = self._pairs[target, spelling]
            if entry.rank == rank:
                break
            heapq.heapreplace(self._queue, (entry.rank, target, spelling))
        heapq.heappop(self._queue)
        del self._pairs[target, spelling]
        pairs = self._spelled[spelling]
        pairs.remove(entry)
        if not pairs:
            del self._spelled[spelling]
        self._touched[spelling] = None

    def _wanted(self, spelling: Spelling) -> int | None:
        pairs = self._spelled.get(spelling, [])
        best = max((e for e in pairs if not e.off), key=lambda e: e.seen, default=None)
        if best is not None:
            return best.target
        static = self._static.get(spelling)
        return None if any(e.target == static for e in pairs) else static


def validated(
    payload: dict[str, Any], draft_bytes: Sequence[bytes | None], target_bytes: Sequence[bytes | None]
) -> tuple[dict[str, Any], int]:
    """The entries of a payload that can be true, and how many were dropped.

    Dropped: ids out of range or without bytes, spellings whose bytes are not the target token's, counts that
    contradict each other, a second entry of the same pair.
    """
    good: dict[tuple[int, Spelling], Entry] = {}
    for entry in _entries(payload):
        if (
            0 <= entry.target < len(target_bytes)
            and min(entry.spelling) >= 0
            and max(entry.spelling) < len(draft_bytes)
            and target_bytes[entry.target] is not None
            and _joined(entry.spelling, draft_bytes) == target_bytes[entry.target]
            and entry.accepted <= entry.proposed
            and min(entry.judged) >= 0
        ):
            good.setdefault((entry.target, entry.spelling), entry)
    return _payload(good.values(), len(good)), len(payload["entries"]) - len(good)


def _joined(spelling: Spelling, draft_bytes: Sequence[bytes | None]) -> bytes | None:
    parts = [draft_bytes[d] for d in spelling]
    return None if None in parts else b"".join(part for part in parts if part is not None)


def _judge_as_later(entry: Entry, mine: Entry) -> None:
    """Of two processes' views of whether a merge is on, keep the one that has gone further."""
    theirs = (entry.forgotten_missed, entry.off, entry.seen_since_off or 0)
    if (mine.forgotten_missed, mine.off, mine.seen_since_off or 0) > theirs:
        # The file may hold less than it did when it was loaded (evicted, forgotten): no more is left out than there is.
        entry.forgotten_accepted = min(mine.forgotten_accepted, entry.accepted)
        entry.forgotten_missed = min(mine.forgotten_missed, entry.proposed - entry.accepted)
        entry.seen_since_off = mine.seen_since_off


def _entries(payload: dict[str, Any] | None) -> list[Entry]:
    entries = []
    for target, spelling, *counts, since_off in payload["entries"] if payload else []:
        seen, proposed, accepted, *forgotten = (int(n) for n in counts)  # JSON may write 3.0 for 3
        entry = Entry(int(target), tuple(int(d) for d in spelling), seen, proposed, accepted)
        entry.forgotten_accepted, entry.forgotten_missed = forgotten
        entry.seen_since_off = None if since_off is None else int(since_off)
        entries.append(entry)
    return entries


def _most_frequent(entries: Sequence[Entry], capacity: int) -> list[Entry]:
    """The entries that stay, in their order, which is that of last use."""
    if len(entries) <= capacity:
        return list(entries)
    keep = sorted(range(len(entries)), key=lambda i: (entries[i].seen + entries[i].accepted, i))[-capacity:]
    return [entries[i] for i in sorted(keep)]


def _payload(entries: Any, capacity: int) -> dict[str, Any]:
    return {"columns": COLUMNS, "entries": [e.row() for e in _most_frequent(list(entries), capacity)]}
