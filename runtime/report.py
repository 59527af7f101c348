"""What a generation tells about itself. The words are those of the glossary (DESIGN.md section 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from omnidraft.runtime.drafting import Draft
from omnidraft.runtime.placed import Placed
from omnidraft.runtime.translation import Kind


@dataclass
class Tally:
    """Counts over rounds. All proposals of a round count, but for those that lie behind a stop."""

    proposed: int = 0
    accepted: int = 0
    merges: int = 0
    merges_accepted: int = 0
    lookups: int = 0
    lookups_accepted: int = 0
    drawn: int = 0
    translated: float = 0
    passes: int = 0

    def add(self, draft: Draft, accepted: int) -> None:
        """One target pass, with the number of proposals that were accepted and emitted.

        The prefill, whose last row gives the first token, counts as a pass without proposals.
        """
        self.passes += 1
        self.drawn += draft.drawn
        self.translated += draft.translated
        self.proposed += len(draft.proposals)
        self.accepted += accepted
        for i, proposal in enumerate(draft.proposals):
            if proposal.kind is Kind.MERGE:
                self.merges += 1
                self.merges_accepted += i < accepted
            elif proposal.kind is Kind.LOOKUP:
                self.lookups += 1
                self.lookups_accepted += i < accepted


@dataclass
class Report:
    """One response: text, why it ended, and where the time went. What was not measured is None.

    A cancelled response holds what was verified, which may be a few tokens more than were delivered.
    `lossless`: "exact" (bit for bit the text of plain decoding), "near", or "biased" (the paper's rule, sampling);
    `decode_width`: the rows of every pass behind the prompt, where exact text needs the same number in all.
    `reused_tokens`: how many tokens at the prompt's beginning an earlier response had read already;
    `tokens_per_second`: emitted tokens after the first, over the time from the first to the last.
    `time_to_first_token` and `phases` are seconds; the phases add up to `seconds`.
    `overhead_ms`: median milliseconds of a round that neither model was running.
    `mean_draft_length`: proposals of a round; `lookup_use`: share of them that was looked up, not drafted.
    `providers`: ONNX Runtime's name of what ran most of each model; `placement`: that, what was asked for, and shares;
    `profiles`: which of a bundle's graphs that was.
    `drafter_failure`: why the drafter failed and the target went on alone, in one line; "" if it ran.
    `counts`: what the rates were made of, for sums over responses; `tokens`: the emitted ids; `predictions`: expected
    acceptance and outcome of each drafted proposal that the target decided.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float | None
    acceptance_rate: float | None
    tokens_per_verify: float | None
    mean_draft_length: float | None
    ngram_use: float | None
    ngram_acceptance: float | None
    coverage: float | None
    lookup_use: float | None
    target: str
    precision: str
    draft: str
    lossless: str
    verification: str
    seed: int
    context_used: float
    time_to_first_token: float | None
    seconds: float
    overhead_ms: float | None
    providers: dict[str, str]
    phases: dict[str, float]
    decode_width: int | None = None
    profiles: dict[str, str] = field(default_factory=dict)
    reused_tokens: int = 0
    drafter_failure: str = ""
    placement: dict[str, Placed] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict, repr=False)
    tokens: list[int] = field(default_factory=list, repr=False)
    predictions: list[tuple[float, bool]] = field(default_factory=list, repr=False)

    @property
    def drafted(self) -> bool:
        """Whether anything could be proposed."""
        return self.draft != "off"

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it, figures rounded to what a measurement means."""
        return {
            k: round(v, 6) if isinstance(v, float) else v
            for k, v in asdict(self).items()
            if k not in ("tokens", "counts", "predictions")
        }


def rate(part: float, whole: float) -> float | None:
    """part / whole, None if nothing was counted."""
    return part / whole if whole else None
