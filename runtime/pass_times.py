"""How long a pass of a graph takes, by its rows and by the length of its past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PassTimes:
    """Measured: `seconds[i][j]` behind `pasts[i]` tokens with `widths[j]` rows; both ascending."""

    pasts: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, past: int) -> list[float]:
        """Seconds of a pass of m rows behind `past` tokens, for m = 0 … the widest measured (0 rows take no time).

        Straight lines between what was measured, and on beyond the longest past.
        """
        pasts, widths = self.pasts, self.widths
        i = next((i for i in range(len(pasts) - 2) if past <= pasts[i + 1]), max(0, len(pasts) - 2))
        if len(pasts) == 1:
            row = list(self.seconds[0])
        else:
            share = max(0.0, (past - pasts[i]) / (pasts[i + 1] - pasts[i]))
            pairs = zip(self.seconds[i], self.seconds[i + 1], strict=True)
            row = [a + share * (b - a) if b > a or share <= 1 else b for a, b in pairs]
        found = [0.0, *[row[0]] * widths[0]]
        for (w, a), (v, b) in zip(zip(widths, row, strict=True), list(zip(widths, row, strict=True))[1:], strict=False):
            found += [a + (b - a) * step / (v - w) for step in range(1, v - w + 1)]
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"pasts": list(self.pasts), "widths": list(self.widths), "seconds": [list(row) for row in self.seconds]}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> PassTimes:
        """What `as_dict` gave. Raises ValueError for what it cannot have given."""
        pasts, widths = (tuple(int(n) for n in found[name]) for name in ("pasts", "widths"))
        seconds = tuple(tuple(row) for row in found["seconds"])
        ascending = all(sorted(set(axis)) == list(axis) for axis in (pasts, widths))
        if not ascending or len(seconds) != len(pasts) or {len(row) for row in seconds} != {len(widths)}:
            raise ValueError("pass times that do not fit together")
        return cls(pasts, widths, seconds)
