"""How an engine decodes: what does not change from response to response."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.translation import Mode

AUTO_LENGTH = 2
LONGEST_DRAFT = 16


@dataclass(frozen=True)
class Options:
    """The choices of a user, checked.

    `draft`: "auto" (a fixed length of 2), "off", or a draft length; `lossless`: "exact" never runs the
    target with fewer than W₀ rows, "near" may; `verification`: "coupled", or "paper" for the paper's
    biased rule; `mode`: what may be used to translate.
    """

    draft: str = "auto"
    lossless: str = "exact"
    verification: str = "coupled"
    mode: Mode = Mode.FULL

    def __post_init__(self) -> None:
        """Raises OmniDraftError for a value outside its range."""
        number = self.draft.isdecimal() and 1 <= int(self.draft) <= LONGEST_DRAFT
        if self.draft not in ("auto", "off") and not number:
            raise OmniDraftError(f"draft must be auto, off or a length from 1 to {LONGEST_DRAFT}, not {self.draft!r}")
        if self.lossless not in ("exact", "near"):
            raise OmniDraftError(f"lossless must be exact or near, not {self.lossless!r}")
        if self.verification not in ("coupled", "paper"):
            raise OmniDraftError(f"verification must be coupled or paper, not {self.verification!r}")
        if self.verification == "paper" and self.draft == "off":
            raise OmniDraftError("verification paper needs a draft; without one there is nothing to verify")

    @property
    def draft_length(self) -> int:
        """k, the most proposals of a round."""
        if self.draft == "off":
            return 0
        return AUTO_LENGTH if self.draft == "auto" else int(self.draft)
