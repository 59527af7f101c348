"""Where proposals come from: the drafter, the look-up, and the choice between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from omnidraft.runtime import drafting, paper
from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.clock import PhaseClock
from omnidraft.runtime.context import DraftContext
from omnidraft.runtime.drafting import Draft, Law, Proposal
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.features import describe
from omnidraft.runtime.lookup import LookUp
from omnidraft.runtime.ngram_cache import NgramCache
from omnidraft.runtime.outlook import Outlook
from omnidraft.runtime.policy import Policy
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.translation import Kind, Translation


class Proposer(Protocol):
    """A source of proposals for one response at a time."""

    @property
    def seconds(self) -> float:
        """Time spent inside a draft model since it was loaded."""
        ...

    @property
    def failure(self) -> str:
        """Why the draft model proposes nothing more in this response, in one line; "" while it runs."""
        ...

    def begin(self, prompt: Sequence[int], prefix: Sequence[int], text: bytes, clock: PhaseClock) -> None:
        """Start a response behind a prompt: target ids; draft ids of its rendered part, then plain text."""
        ...

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """Up to `limit` proposals for the absolute positions from `position` on."""
        ...

    def observe(self, draft: Draft, emitted: Sequence[int]) -> None:
        """Learn what the target emitted in the round that verified `draft`."""
        ...

    def close_round(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """What the round took: see `Policy.close`."""
        ...

    def finish(self) -> None:
        """The response has ended: settle what was put off."""
        ...


class Nothing:
    """The proposer of plain decoding."""

    seconds = 0.0
    failure = ""

    def begin(self, prompt: Sequence[int], prefix: Sequence[int], text: bytes, clock: PhaseClock) -> None:
        """Nothing to follow."""

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """No proposals."""
        return Draft()

    def observe(self, draft: Draft, emitted: Sequence[int]) -> None:
        """Nothing to learn."""

    def close_round(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """Nothing to follow."""

    def finish(self) -> None:
        """Nothing was put off."""


class Drafter:
    """Proposals of the draft model, translated to the target's vocabulary."""

    def __init__(
        self,
        decoder: CausalModel,
        draft_tokens: TokenBytes,
        target_tokens: TokenBytes,
        translation: Translation,
        cache: NgramCache | None,
        outlook: Outlook,
        policy: Policy,
        context: int,
        ends: Collection[int],
        paper_rule: bool = False,
    ) -> None:
        """`context`: the drafter's positions; `ends`: the target's stop ids; `cache` None: do not learn n-grams."""
        self.decoder, self._context_limit, self._ends = decoder, context, frozenset(ends)
        self._draft_tokens, self._target_tokens = draft_tokens, target_tokens
        self._translation, self._cache, self._paper = translation, cache, paper_rule
        self.outlook, self._policy = outlook, policy
        self._unread: list[int] = []
        self._temperature = 0.0
        self._apply_changes()

    @property
    def seconds(self) -> float:
        """Time spent inside the draft model since it was loaded."""
        return self.decoder.seconds

    def begin(self, prefix: Sequence[int], text: bytes, clock: PhaseClock) -> None:
        """Feed the prompt, so that the first round finds the drafter ready."""
        self._clock, self._unread = clock, []
        self._context = DraftContext(self.decoder, self._draft_tokens, self._context_limit, prefix)
        if text:
            self._context.commit([text])
        self._context.logits(())

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """One round's draft, by the coupled draw or by the paper's rule."""
        self.read()
        self._temperature = sampling.temperature
        if self._paper:
            size = len(self._target_tokens.bytes_of)
            return paper.propose(self._context, self._translation, sampling, position, limit, self._ends, size)
        return drafting.draft(self._context, self._translation, sampling, position, limit, self._ends, self)

    def expect(self, path: tuple[int, ...], law: Law, proposal: Proposal, piece: int, index: int) -> float:
        """For `drafting.draft`: by the outlook."""
        token, kind = proposal.token, proposal.kind
        seen = describe(law.masses, law.coverage, token, kind, piece, index, self._temperature)
        return self.outlook.expect(self._context.hidden(path), seen)

    def more(self, expected: Sequence[float]) -> bool:
        """For `drafting.draft`: by the policy."""
        return self._policy.more(expected)

    def observe(self, draft: Draft, emitted: Sequence[int]) -> None:
        """Count what became of the proposals; the emitted tokens are read when the next draft begins.

        While the drafter rests, that costs nothing, and reading many tokens in one pass costs little.
        """
        self._unread += emitted
        for proposal, y in zip(draft.proposals, emitted, strict=False):
            if proposal.kind is Kind.LOOKUP:
                continue
            if proposal.kind is Kind.MERGE and self._cache is not None:
                self._cache.record(proposal.token, proposal.path, proposal.token == y)
            if proposal.expected is not None:
                self.outlook.observe(proposal.expected, proposal.token == y)

    def read(self) -> None:
        """Follow the emitted tokens and learn the n-grams that spell them; special tokens have no text."""
        if not self._unread:
            return
        before = self._clock.phase
        self._clock.enter("translate")
        spoken = [t for t in self._unread if self._target_tokens.bytes_of[t]]
        self._unread = []
        spellings = self._context.commit([self._target_tokens.bytes_of[t] or b"" for t in spoken])
        if self._cache is not None:
            self._clock.enter("learn")
            for token, spelling in zip(spoken, spellings, strict=True):
                if len(spelling) > 1:
                    self._cache.observe(token, spelling)
            self._apply_changes()
        self._clock.enter(before)

    def _apply_changes(self) -> None:
        for spelling, target in self._cache.take_changes() if self._cache is not None else ():
            if target is None:
                self._translation.trie.remove(spelling)
            else:
                self._translation.trie.set(spelling, target)


class Choice:
    """The proposer of drafting: in each round the look-up or the drafter, as long as the policy says.

    A drafter that fails is left alone for the rest of the response: the target needs none of its proposals.
    """

    def __init__(self, drafter: Drafter, lookup: LookUp | None, policy: Policy) -> None:
        self.drafter, self.lookup, self._policy = drafter, lookup, policy
        self.failure = ""

    @property
    def seconds(self) -> float:
        """Time spent inside the draft model since it was loaded."""
        return self.drafter.seconds

    def begin(self, prompt: Sequence[int], prefix: Sequence[int], text: bytes, clock: PhaseClock) -> None:
        """Both follow the response."""
        self.failure = ""
        try:
            self.drafter.begin(prefix, text, clock)
        except OmniDraftError as error:
            self.failure = str(error)
        if self.lookup is not None:
            self.lookup.begin(prompt)

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        """What was found costs nothing; the drafter is asked where it is expected to gain more."""
        limit = min(limit, self._policy.longest)
        found = Draft() if self.lookup is None else self._found(self.lookup, limit)
        if self._policy.opens(position - 1, limit, found.expected):
            drawn = self._drawn(sampling, position, limit)
            if not drawn.proposals:
                self._policy.more([])
            kept, gain = self._policy.keep(drawn.expected)
            if not found.proposals or gain >= self._policy.keep(found.expected)[1]:
                drawn.proposals = drawn.proposals[:kept]
                return drawn
            found.drawn, found.translated = drawn.drawn, drawn.translated
        found.proposals = found.proposals[: self._policy.keep(found.expected)[0]] if found.proposals else []
        return found

    def observe(self, draft: Draft, emitted: Sequence[int]) -> None:
        """Both follow what was said."""
        self.drafter.observe(draft, emitted)
        if self.lookup is not None:
            self.lookup.extend(emitted)

    def close_round(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """The policy follows what rounds take."""
        self._policy.close(rows, verify_seconds, emitted, seconds)

    def finish(self) -> None:
        """The drafter reads to the end, for its n-gram cache."""
        self.drafter.read()

    def _drawn(self, sampling: Sampling, position: int, limit: int) -> Draft:
        if self.failure:
            return Draft()
        try:
            return self.drafter.propose(sampling, position, limit)
        except OmniDraftError as error:
            self.failure = str(error)
            return Draft()

    def _found(self, lookup: LookUp, limit: int) -> Draft:
        found = lookup.find(limit)
        pairs = zip(found.tokens, found.expected, strict=True)
        return Draft([Proposal(token, Kind.LOOKUP, (), a, a) for token, a in pairs])
