"""The targets of a bundle, each opened when it is first asked for, and learning between their answers."""

from __future__ import annotations

from omnidraft.runtime.bundle import Target, open_bundle
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools import options as o
from omnidraft.tools.answering import Answerer, Setup


class Engines:
    """Belongs to one thread, but for what it says about the bundle. `learning`: whether answers are learned from."""

    def __init__(self, setup: Setup, learning: bool) -> None:
        """Raises OmniDraftError if the bundle cannot be opened."""
        self.setup, self.learning = setup, learning
        self.bundle = open_bundle(setup.bundle)
        self._open: dict[str, Answerer] = {}
        self._last: Answerer | None = None

    @property
    def targets(self) -> dict[str, Target]:
        """The targets by name."""
        return self.bundle.targets

    def precision(self, name: str) -> str:
        """What was asked for, or the target's first."""
        return self.setup.precision or self.bundle.graph(name, None).precision

    def fingerprint(self, name: str) -> str:
        """What an answer of a target depends on beside the request: weights and precision."""
        return f"omnidraft-{self.targets[name].weights_sha256[:12]}-{self.precision(name)}"

    def is_open(self, name: str) -> bool:
        """Whether a target is in memory."""
        return name in self._open

    def open(self, name: str) -> Answerer:
        """A target, ready. Raises OmniDraftError if it cannot be opened."""
        if name not in self._open:
            self._open[name] = Answerer(self.setup, name, self.learning)
        return self._open[name]

    def set_learning(self, on: bool) -> None:
        """Learn, or do not, from the next answer on. Raises OmniDraftError, and changes nothing, where it cannot."""
        if on and self.setup.state.folder is None:
            raise OmniDraftError("learning needs a state folder to keep what it learns; start without --no-state")
        if on != self.learning:
            for answerer in self._open.values():
                answerer.set_learning(on)
            self.learning, self._last = on, None

    def answered(self, answerer: Answerer) -> None:
        """It has given a whole answer, which `learn` may learn from."""
        self._last = answerer

    def learn(self) -> None:
        """Learn from the last answer, now and then. A trainer that dies ends learning; one line says so."""
        last, self._last = self._last, None
        if last is None or not self.learning:
            return
        try:
            last.learn()
        except OmniDraftError as error:
            o.warn(f"{error}; learning is off from here on")
            self.set_learning(False)

    def close(self) -> None:
        """Free what learning took; what was learned has been saved."""
        for answerer in self._open.values():
            answerer.close()
