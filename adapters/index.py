"""What is known of the versions of one adapter, and which is in use: numbers and hashes, no files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KEEP = 5


@dataclass(frozen=True)
class Forecast:
    """Acceptance rate on held-out text without and with what was learned; None where it was not measured."""

    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class Facts:
    """What a trainer's snapshot does not say of itself.

    `loss`: "projected" or "paper", None if unknown; `samples`: positions learned from, all in all.
    """

    loss: str | None = None
    samples: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    note: str = ""


@dataclass(frozen=True)
class Version:
    """One kept adapter. `parent` is the version that it took the place of, 0 the drafter as shipped.

    `adapter` and `optimizer` are SHA-256 of files; `optimizer` None: the moments begin anew.
    """

    created: str
    rank: int
    trainer: str
    steps: int
    loss: str | None
    samples: int
    forecast: Forecast
    note: str
    adapter: str
    optimizer: str | None
    number: int = 0
    parent: int = 0


@dataclass(frozen=True)
class Index:
    """The versions of one (drafter, target) pair by number. `current` 0 is the drafter as shipped.

    `last` is the highest number ever given: none is used twice.
    """

    drafter: str
    target: str
    versions: tuple[Version, ...] = ()
    current: int = 0
    last: int = 0

    def find(self, number: int) -> Version | None:
        """The version of a number, None if it is not kept (0 never is)."""
        return next((version for version in self.versions if version.number == number), None)

    def added(self, version: Version) -> Index:
        """With a further version, which gets the next number and is in use; old ones make room."""
        version = replace(version, number=self.last + 1, parent=self.current)
        grown = replace(self, versions=(*self.versions, version), current=version.number, last=version.number)
        return grown._pruned()

    def using(self, number: int) -> Index:
        """With another version in use, which must be a kept one or 0."""
        return replace(self, current=number)

    def without(self, number: int) -> Index:
        """Without a version: its parent takes its place, as the current one and as a parent."""
        gone = self.find(number)
        if gone is None:
            return self
        kept = tuple(
            replace(version, parent=gone.parent) if version.parent == number else version
            for version in self.versions
            if version is not gone
        )
        return replace(self, versions=kept, current=gone.parent if self.current == number else self.current)

    def files(self) -> set[str]:
        """Names of the files that the versions need."""
        return {name for version in self.versions for name in (adapter_name(version), optimizer_name(version)) if name}

    def payload(self) -> dict[str, Any]:
        """As the document has it (schemas/adapters.json)."""
        return {**asdict(self), "versions": [asdict(version) for version in self.versions]}

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Index:
        """What `payload` gave."""
        versions = (Version(**{**v, "forecast": Forecast(**v["forecast"])}) for v in payload["versions"])
        return cls(**{**payload, "versions": tuple(versions)})

    def _pruned(self) -> Index:
        """With at most KEEP versions: those that the current one came from, nearest first, then the newest."""
        wanted = [*self._line(), *(version.number for version in reversed(self.versions))]
        keep = list(dict.fromkeys(wanted))[:KEEP]
        pruned = self
        for version in self.versions:
            if version.number not in keep:
                pruned = pruned.without(version.number)
        return pruned

    def _line(self) -> Iterator[int]:
        """The current version and its ancestors, as far as they are kept."""
        version = self.find(self.current)
        while version is not None:
            yield version.number
            version = self.find(version.parent)


def adapter_name(version: Version) -> str:
    """File of the LoRA weights. Named by content, so that it can be written before the number is known."""
    return f"{version.adapter[:12]}.onnx_adapter"


def optimizer_name(version: Version) -> str | None:
    """File of the optimizer's state, if there is one."""
    return None if version.optimizer is None else f"{version.optimizer[:12]}.optimizer"
