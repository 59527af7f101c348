"""The terminal of a chat: lines that were typed come in, answers go to standard output, all else to standard error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType

from rich.console import Console

from omnidraft.runtime.generation import Chunk

with suppress(ImportError):  # Windows has none, and edits lines by itself
    import readline  # noqa: F401  (input() uses it once it is loaded)

PROMPT, PROMPT_INSIDE, QUOTES = "> ", ". ", '"""'
ACCEPTED = "green"
# A model may say anything, and what commands a terminal is made of these.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(b"\t\n"), "\ufffd")


class Terminal:
    """Works with pipes too: without a prompt and without colour."""

    def __init__(self, quiet: bool) -> None:
        """`quiet`: no colour, and nothing that nobody asked for but warnings."""
        self.quiet = quiet
        self._console = Console(highlight=False)
        self.coloured = not (quiet or self._console.no_color) and self._console.color_system is not None
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def typed(self) -> Iterator[tuple[str, bool]]:
        """What is typed, until the end of input, and whether it is text in any case.

        A line is text or a command. Lines from a line that begins with three quotes to one that ends with them are
        one text.
        """
        while (line := self._line(PROMPT)) is not None:
            begin = line.lstrip()
            if begin.startswith(QUOTES):
                yield self._until_quotes(begin.removeprefix(QUOTES)), True
            else:
                yield line, False

    def show(self, chunk: Chunk) -> None:
        """A piece of an answer; what the drafter proposed has a colour."""
        text = chunk.text.translate(CONTROLS) if self._console.is_terminal else chunk.text
        if self.coloured and chunk.from_draft:
            self._console.out(text, style=ACCEPTED, end="")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        """End the answer, or the line that shows that Ctrl-C was pressed."""
        print(flush=True)

    def say(self, line: str) -> None:
        """A line that somebody asked for."""
        print(line, file=sys.stderr)

    def remark(self, line: str) -> None:
        """A line for those who did not ask for quiet."""
        if not self.quiet:
            self.say(line)

    def _line(self, prompt: str) -> str | None:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            if sys.stdout.isatty():
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)  # input() would write it into the answers
            return input()
        except EOFError:
            self.say("")
            return None
        except KeyboardInterrupt:
            self.say("")
            raise

    def _until_quotes(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            following = self._line(PROMPT_INSIDE)
            if following is None:
                return "\n".join(lines)
            lines.append(following)
        return "\n".join(lines).rstrip().removesuffix(QUOTES)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed in here, once, in place of KeyboardInterrupt: no round is left half done.

    Pressed again, it is KeyboardInterrupt.
    """
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
