"""A conversation: what was said, how much of it the target still reads, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.prompt import Message
from omnidraft.runtime.report import Report, rate
from omnidraft.tools.report_lines import figures


@dataclass(frozen=True)
class Exchange:
    """A question with its answer, as they were shown, and the answer's report."""

    question: str
    answer: str
    report: Report


@dataclass
class Conversation:
    """`system`: what stands before every prompt, None for the template's own.

    `left_out`: how many of the oldest exchanges no longer go into the prompt; `file`: where it was saved last.
    """

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    left_out: int = 0
    file: Path | None = None

    def messages(self, left_out: int = 0) -> list[Message]:
        """The messages but for the oldest exchanges."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in self.exchanges[left_out:]:
            found.append({"role": "user", "content": exchange.question})
            found.append({"role": "assistant", "content": exchange.answer})
        return found

    def prompt(self, question: str, engine: Engine, max_new_tokens: int) -> list[Message]:
        """The messages for the next answer. The oldest exchanges go where it needs their room in the context.

        A question that does not fit on its own moves nothing, and the engine refuses the prompt.
        """
        asked = {"role": "user", "content": question}
        for left_out in range(self.left_out, len(self.exchanges) + 1):
            found = [*self.messages(left_out), asked]
            if engine.room(_tokens(engine, found)) >= max_new_tokens:
                self.left_out = left_out
                break
        return found

    def tokens(self, engine: Engine) -> int:
        """How many tokens the target reads before the next question."""
        return _tokens(engine, self.messages(self.left_out)) if self.exchanges else 0

    def figures(self) -> list[str]:
        """A line for each target that answered."""
        targets = dict.fromkeys((e.report.target, e.report.precision) for e in self.exchanges)
        reports = [e.report for e in self.exchanges]
        return [
            f"{name} ({precision}): " + _figures([r for r in reports if (r.target, r.precision) == (name, precision)])
            for name, precision in targets
        ]

    def document(self, bundle: str) -> dict[str, Any]:
        """All of it for a file: messages as chat APIs have them, and beside them the report of each answer."""
        answers = [{k: v for k, v in e.report.as_dict().items() if k != "text"} for e in self.exchanges]
        saved = datetime.now(UTC).isoformat(timespec="seconds")
        return {"bundle": bundle, "saved": saved, "messages": self.messages(), "answers": answers}


def counted(number: int, what: str) -> str:
    """1 exchange, 2 exchanges."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _tokens(engine: Engine, messages: list[Message]) -> int:
    return len(engine.pair.target.prompts.chat(messages))


def _figures(reports: Sequence[Report]) -> str:
    tokens = sum(r.completion_tokens for r in reports)
    accepted, proposed, passes = (sum(r.counts[k] for r in reports) for k in ("accepted", "proposed", "passes"))
    timed = [(r.completion_tokens - 1, r.tokens_per_second) for r in reports if r.tokens_per_second]
    speed = rate(sum(n for n, _ in timed), sum(n / speed for n, speed in timed))
    drafted = any(r.drafted for r in reports)
    parts = figures(tokens, speed, rate(accepted, proposed), rate(tokens, passes) if drafted else None)
    return f"{counted(len(reports), 'answer')}, " + " · ".join(parts)
