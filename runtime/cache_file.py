"""Where an n-gram cache is kept: one document of the state folder, shared with other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omnidraft.runtime.ngram_cache import SCHEMA, NgramCache, Spelling, validated
from omnidraft.runtime.state import Key, Payload, State


class CacheFile:
    """The cache document of one (drafter, target) pair.

    `relative` names the document, `key` the two tokenizers it depends on; `draft_bytes` and `target_bytes` give the
    bytes of each token id, which every entry that comes from the file must fit.
    """

    def __init__(
        self,
        state: State,
        relative: str,
        key: Key,
        draft_bytes: Sequence[bytes | None],
        target_bytes: Sequence[bytes | None],
    ) -> None:
        self._state = state
        self._relative = relative
        self._key = key
        self._bytes = draft_bytes, target_bytes
        self._missing = True

    @property
    def path(self) -> Path | None:
        """Where the document is, None if nothing is kept."""
        return None if self._state.folder is None else self._state.folder / self._relative

    def open(self, capacity: int = 4096, static: Mapping[Spelling, int] | None = None) -> NgramCache:
        """The cache as the file has it; an empty one where there is no file that can be used."""
        payload = self._checked(self._state.load(self._relative, SCHEMA, self._key))
        self._missing = payload is None
        return NgramCache.from_payload(payload, capacity, static)

    def save(self, cache: NgramCache) -> None:
        """Add what `cache` counted since its last load or save to the file, and take over what others added.

        If it cannot be written, one line says why, and the next save tries again with nothing lost or counted twice.
        """
        if not cache.unsaved and not self._missing:
            return
        written = self._state.update(self._relative, SCHEMA, self._key, lambda old: cache.merged(self._checked(old)))
        if written is not None:
            self._missing = False
            cache.adopt(written)

    def _checked(self, payload: Payload | None) -> Payload | None:
        if payload is None:
            return None
        good, dropped = validated(payload, *self._bytes)
        if dropped:
            self._state.warn(f"{self._relative}: {dropped} entries do not fit the tokenizers, dropped")
        return good
