"""How the drafter learns: the choices of a user, checked."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.adapters.labels import LOSSES
from omnidraft.adapters.trainers import TRAINERS
from omnidraft.runtime.errors import OmniDraftError

RANK = 32


@dataclass(frozen=True)
class Settings:
    """`loss`: one of LOSSES; `weight`: λ, None for the target's probability.

    `rank` of LoRA, None for RANK, or that of what was learned before; `rate`: AdamW's.

    `batch`: samples of a step; `interval`: fresh samples that begin a round of learning; `budget`: seconds of
    learning for each second of decoding; `trainer`: one of TRAINERS.
    """

    loss: str = "projected"
    weight: float | None = 0.2
    rank: int | None = None
    rate: float = 4e-3
    batch: int = 8
    interval: int = 8
    budget: float = 0.2
    trainer: str = "auto"

    def __post_init__(self) -> None:
        """Raises OmniDraftError for a value outside its range."""
        if self.loss not in LOSSES:
            raise OmniDraftError(f"loss must be {' or '.join(LOSSES)}, not {self.loss!r}")
        if self.trainer not in TRAINERS:
            raise OmniDraftError(f"trainer must be {', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}, not {self.trainer!r}")
        for name, number, high in (
            ("rank", self.rank or RANK, 256), ("batch", self.batch, 256), ("interval", self.interval, 10_000)
        ):  # fmt: skip
            if not 1 <= number <= high:
                raise OmniDraftError(f"{name} must be from 1 to {high}, not {number}")
        for name, value, most in (("rate", self.rate, 1.0), ("budget", self.budget, 100.0)):
            if not 0 < value <= most:
                raise OmniDraftError(f"{name} must be above 0 and at most {most:g}, not {value:g}")
        if self.weight is not None and not 0 <= self.weight <= 10:
            raise OmniDraftError(f"lambda must be from 0 to 10, or dynamic, not {self.weight:g}")
