"""How verbs that answer open a target: the engine, what was learned for it, and learning between the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omnidraft.adapters.layout import Layout
from omnidraft.adapters.learner import Learner, Round
from omnidraft.adapters.settings import Settings
from omnidraft.adapters.store import AdapterStore
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.placement import Wishes
from omnidraft.runtime.state import State, default_state_folder
from omnidraft.tools import options as o


@dataclass(frozen=True)
class Setup:
    """What the options of a verb say about every target of a bundle. `trainer`: for whoever learns."""

    bundle: Path
    precision: str | None
    options: Options
    wishes: Wishes
    threads: int
    state: State
    trainer: str


class Answerer:
    """A target that is ready to answer. It drafts with the adapter that was learned for it, if there is one."""

    def __init__(self, setup: Setup, target: str | None, learning: bool) -> None:
        """`target` None: the bundle's first. Raises OmniDraftError for what cannot be opened, or cannot learn."""
        self.setup = setup
        self.engine = Engine.open(
            setup.bundle,
            target,
            setup.precision,
            setup.options,
            setup.state,
            setup.threads,
            o.warn,
            o.tell,
            setup.wishes,
        )
        self.learner = Learner(self.engine, setup.state, _settings(setup), o.warn) if learning else None
        self._version = _use_learned(self.engine, setup.state) if self.learner is None else 0

    @property
    def version(self) -> int:
        """The adapter in use, 0 for the drafter as shipped."""
        return self._version if self.learner is None else self.learner.version

    def set_learning(self, on: bool) -> None:
        """Learn, or do not, from the next answer on.

        An engine that keeps answers keeps them for good, so the pair gets a new engine. Raises OmniDraftError, and
        changes nothing, where learning is not possible.
        """
        setup, old = self.setup, self.engine
        engine = Engine(old.pair, old.options, setup.state, old.calibration)
        learner = Learner(engine, setup.state, _settings(setup), o.warn) if on else None
        self.close()
        self.engine, self.learner = engine, learner
        self._version = _use_learned(engine, setup.state) if learner is None else 0

    def learn(self) -> Round | None:
        """Learn from the last answer, now and then; None if nothing was. Raises OmniDraftError if the trainer dies."""
        return None if self.learner is None else self.learner.after_response()

    def close(self) -> None:
        """Free what learning took; what was learned has been saved."""
        if self.learner is not None:
            self.learner.close()


def check_learning(learn: str, trainer: str, no_state: bool, draft: str) -> bool:
    """Whether to learn. Raises OmniDraftError for options that do not go together."""
    if learn not in ("on", "off"):
        raise OmniDraftError(f"--learn {learn}: choose on or off")
    if learn == "off" and trainer != "auto":
        raise OmniDraftError("--trainer says how to learn; give --learn on with it")
    if learn == "on" and no_state:
        raise OmniDraftError("--learn on needs a state folder to keep what it learns; leave --no-state out")
    if learn == "on" and draft == "off":
        raise OmniDraftError("--learn on needs a drafter; leave --draft off out")
    return learn == "on"


def open_state(folder: Path | None, no_state: bool, learning: bool) -> State:
    """The state folder that was asked for, or the platform's. Only learning cannot do without one.

    Raises OmniDraftError if it is not usable, or both options are given.
    """
    if no_state and folder is not None:
        raise OmniDraftError("--state and --no-state exclude each other; give one of them")
    folder = None if no_state else folder or default_state_folder()
    return State(folder, o.warn) if learning else State.where_possible(folder, o.warn)


def _settings(setup: Setup) -> Settings:
    return Settings(trainer=setup.trainer)


def _use_learned(engine: Engine, state: State) -> int:
    """Draft with the adapter that was learned for this target, if there is one; its version."""
    drafter = engine.pair.drafter
    if drafter is None or drafter.info.lora is None or state.folder is None:
        return 0
    layout = Layout(drafter.info.lora["projections"])
    version, snapshot = AdapterStore(state, drafter.info, engine.pair.target.info, layout).current()
    if version is None or snapshot is None:
        return 0
    engine.use_adapter(layout.parameters(snapshot.lora), snapshot.head)
    return version.number
