"""A chat: a conversation with the targets of one bundle, one answer at a time."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import dataclass, replace

from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools import options as o
from omnidraft.tools.answering import Answerer, Setup
from omnidraft.tools.chat_conversation import Conversation, Exchange, counted
from omnidraft.tools.chat_terminal import Terminal, deferred_interrupt
from omnidraft.tools.report_lines import learned, summary


@dataclass(frozen=True)
class Asking:
    """How answers are made. `seed` None: a new one for each answer."""

    sampling: Sampling
    seed: int | None
    max_new_tokens: int


class Chat:
    """Answers what is asked, with all of the conversation that fits; learns between the answers, if it shall."""

    def __init__(
        self, setup: Setup, target: str | None, learning: bool, conversation: Conversation, asking: Asking,
        terminal: Terminal,
    ) -> None:  # fmt: skip
        """Raises OmniDraftError for a target that cannot be opened, or has no chat template."""
        self.setup, self.conversation, self.terminal = setup, conversation, terminal
        self.ended = False
        self._asking = asking
        self.answerer = self._open(target, learning)

    @property
    def engine(self) -> Engine:
        """That of the target in use."""
        return self.answerer.engine

    def greet(self) -> None:
        """Say once what is here, where somebody waits for it."""
        pair = self.engine.pair
        colour = "; green: the drafter proposed it" if self.terminal.coloured and pair.drafter is not None else ""
        if not self.terminal.quiet:
            o.tell(f"{pair.name} ({pair.precision}) answers; /help lists the commands{colour}")

    def ask(self, question: str) -> None:
        """One more exchange. What goes wrong is said in a line, and the conversation stays as it was."""
        try:
            self._exchange(question)
        except OmniDraftError as error:
            o.warn(str(error))
            return
        try:
            self._learn()
        except OmniDraftError as error:
            self.answerer.set_learning(False)
            o.warn(f"{error}; learning is off from here on, /learn on tries again")

    def use_target(self, name: str) -> None:
        """Let another target of the bundle answer. Raises OmniDraftError, and changes nothing, if it cannot."""
        opened = self._open(name, self.answerer.learner is not None)
        self.answerer.close()
        self.answerer = opened
        self.conversation.left_out = 0  # its context may be longer

    def reset(self) -> None:
        """Begin a new conversation."""
        self.conversation = Conversation(self.conversation.system)

    def close(self) -> None:
        """Free what learning took."""
        self.answerer.close()

    def _open(self, target: str | None, learning: bool) -> Answerer:
        name, info = open_bundle(self.setup.bundle).target(target)
        if info.chat_template is None:
            raise OmniDraftError(
                f"{self.setup.bundle}: target {name!r} has no chat template, it only continues text; use: omnidraft "
                f"run {self.setup.bundle} TEXT --target {name} --raw"
            )
        return Answerer(self.setup, name, learning)

    def _exchange(self, question: str) -> None:
        engine, conversation, asking = self.engine, self.conversation, self._asking
        before = conversation.left_out
        messages = conversation.prompt(question, engine, asking.max_new_tokens)
        dropped = conversation.left_out - before
        if dropped:
            o.warn(f"the context is full: {counted(dropped, 'exchange')} from the beginning left out")
        seed = secrets.randbits(32) if asking.seed is None else asking.seed
        sampling = replace(asking.sampling, seed=seed)
        said: list[str] = []
        with deferred_interrupt() as pressed:
            try:
                with closing(engine.stream(messages, sampling, asking.max_new_tokens)) as stream:
                    for chunk in stream:
                        if pressed():
                            break
                        said.append(chunk.text)
                        self.terminal.show(chunk)
            finally:
                if said or pressed():
                    self.terminal.end_line()
        if not said:
            o.warn("stopped before a word was said: the question is taken back")
            return
        assert engine.report is not None
        conversation.exchanges.append(Exchange(question, "".join(said), engine.report))
        self.terminal.remark(summary(engine.report, sampling.temperature > 0))

    def _learn(self) -> None:
        with deferred_interrupt():  # pressed a moment too late to stop the answer
            done = self.answerer.learn()
        if done is None or self.answerer.learner is None:
            return
        line = learned(done, self.answerer.learner.trainer_reason)
        if done.kept:
            line += f"; adapter version {self.answerer.version} drafts from here on"
        self.terminal.remark(line)
