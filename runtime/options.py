"""How an engine decodes: what does not change from response to response."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.policy import LONGEST_DRAFT
from omnidraft.runtime.translation import Mode

GAMMA = 0.6
THRESHOLD = "threshold"


@dataclass(frozen=True)
class Options:
    """The choices of a user, checked.

    `draft`: "cost" (as many proposals as pay, measured), "threshold" or "threshold:GAMMA" (the paper's rule), a fixed
    length, or "off"; `lossless`: "exact" never runs the target with fewer than W₀ rows, "near" may; `verification`:
    "coupled", or "paper" for the paper's biased rule; `mode`: what may be used to translate; `lookup`: whether text
    that was there before may be proposed, which only "cost" does.
    """

    draft: str = "cost"
    lossless: str = "exact"
    verification: str = "coupled"
    mode: Mode = Mode.FULL
    lookup: bool = True

    def __post_init__(self) -> None:
        """Raises OmniDraftError for a value outside its range."""
        if self.draft not in ("cost", "off") and self.gamma is None and self.fixed is None:
            raise OmniDraftError(
                f"draft must be cost, threshold, threshold:G with 0 < G < 1, off, or a length from 1 to "
                f"{LONGEST_DRAFT}, not {self.draft!r}"
            )
        if self.lossless not in ("exact", "near"):
            raise OmniDraftError(f"lossless must be exact or near, not {self.lossless!r}")
        if self.verification not in ("coupled", "paper"):
            raise OmniDraftError(f"verification must be coupled or paper, not {self.verification!r}")
        if self.verification == "paper" and self.fixed is None:
            raise OmniDraftError("verification paper decides before it draws: give it a fixed length, as in --draft 2")

    @property
    def fixed(self) -> int | None:
        """k, where it is fixed."""
        length = int(self.draft) if self.draft.isdecimal() else 0
        return length if 1 <= length <= LONGEST_DRAFT else None

    @property
    def gamma(self) -> float | None:
        """γ, where the threshold decides."""
        name, _, number = self.draft.partition(":")
        if name != THRESHOLD:
            return None
        try:
            gamma = float(number) if _ else GAMMA
        except ValueError:
            return None
        return gamma if 0 < gamma < 1 else None

    @property
    def drafts(self) -> bool:
        """Whether anything is proposed at all."""
        return self.draft != "off"

    @property
    def measured(self) -> bool:
        """Whether pass times are needed to decide."""
        return self.draft == "cost"
