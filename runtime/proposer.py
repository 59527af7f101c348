"""The drafter at work: it follows one target's text, proposes, and learns n-grams from what was said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from omnidraft.runtime import drafting, paper
from omnidraft.runtime.clock import PhaseClock
from omnidraft.runtime.context import DraftContext
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.drafting import Draft
from omnidraft.runtime.ngram_cache import NgramCache
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.translation import Kind, Translation


class Proposer(Protocol):
    """A source of proposals for one response."""

    @property
    def seconds(self) -> float:
        """Time spent inside a draft model since it was loaded."""
        ...

    def begin(self, prefix: Sequence[int], text: bytes) -> None:
        """Start a response behind a prompt: draft ids of its rendered part, then plain text."""
        ...

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """Up to `limit` proposals for the absolute positions from `position` on."""
        ...

    def observe(self, draft: Draft, emitted: Sequence[int], clock: PhaseClock) -> None:
        """Learn what the target emitted in the round that verified `draft`."""
        ...


class Nothing:
    """The proposer of plain decoding."""

    seconds = 0.0

    def begin(self, prefix: Sequence[int], text: bytes) -> None:
        """Nothing to follow."""

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """No proposals."""
        return Draft()

    def observe(self, draft: Draft, emitted: Sequence[int], clock: PhaseClock) -> None:
        """Nothing to learn."""


class Drafter:
    """Proposals of the draft model, translated to the target's vocabulary."""

    def __init__(
        self,
        decoder: Decoder,
        draft_tokens: TokenBytes,
        target_tokens: TokenBytes,
        translation: Translation,
        cache: NgramCache | None,
        context: int,
        ends: Collection[int],
        paper_rule: bool = False,
    ) -> None:
        """`context`: the drafter's positions; `ends`: the target's stop ids; `cache` None: do not learn n-grams."""
        self.decoder, self._context_limit, self._ends = decoder, context, frozenset(ends)
        self._draft_tokens, self._target_tokens = draft_tokens, target_tokens
        self._translation, self._cache, self._paper = translation, cache, paper_rule
        self._apply_changes()

    @property
    def seconds(self) -> float:
        """Time spent inside the draft model since it was loaded."""
        return self.decoder.seconds

    def begin(self, prefix: Sequence[int], text: bytes) -> None:
        """Feed the prompt, so that the first round finds the drafter ready."""
        self._context = DraftContext(self.decoder, self._draft_tokens, self._context_limit, prefix)
        if text:
            self._context.commit([text])
        self._context.logits(())

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """One round's draft, by the coupled draw or by the paper's rule."""
        if self._paper:
            size = len(self._target_tokens.bytes_of)
            return paper.propose(self._context, self._translation, sampling, position, limit, self._ends, size)
        return drafting.draft(self._context, self._translation, sampling, position, limit, self._ends)

    def observe(self, draft: Draft, emitted: Sequence[int], clock: PhaseClock) -> None:
        """Follow the emitted tokens and count what became of the merges; special tokens have no text."""
        clock.enter("translate")
        spoken = [t for t in emitted if self._target_tokens.bytes_of[t]]
        spellings = self._context.commit([self._target_tokens.bytes_of[t] or b"" for t in spoken])
        clock.enter("learn")
        if self._cache is not None:
            for token, spelling in zip(spoken, spellings, strict=True):
                if len(spelling) > 1:
                    self._cache.observe(token, spelling)
            for proposal, y in zip(draft.proposals, emitted, strict=False):
                if proposal.kind is Kind.MERGE:
                    self._cache.record(proposal.token, proposal.path, proposal.token == y)
            self._apply_changes()
        clock.enter("other")

    def _apply_changes(self) -> None:
        for spelling, target in self._cache.take_changes() if self._cache is not None else ():
            if target is None:
                self._translation.trie.remove(spelling)
            else:
                self._translation.trie.set(spelling, target)
