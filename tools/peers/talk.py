"""How the bench and a peer's process talk: one JSON object a line, an answer for each request.

The first request opens the model, the others ask for answers; the process ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from omnidraft.runtime.errors import OmniDraftError

SECONDS = 600.0  # that one answer may take; the slowest peer gives a token in a tenth of a second


@dataclass(frozen=True)
class Request:
    """Continue `ids` until a stop id, or `max_new_tokens`; `sampling`: the fields of `Sampling`."""

    ids: list[int]
    max_new_tokens: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """`tokens`: the new ids, a stop id included. Times are seconds, by the worker's clock, around generation only.

    `first`: tokens that came first, all at once, after `first_seconds`; `passes` of the target; `proposed` and
    `accepted`: target tokens; `drafting`: seconds outside the target after the first tokens. 0 where nothing drafts.
    """

    tokens: list[int]
    first: int
    first_seconds: float
    seconds: float
    passes: int
    proposed: int = 0
    accepted: int = 0
    drafting: float = 0.0


Generate = Callable[[Request], Answer]
Facts = dict[str, Any]


def serve(open_model: Callable[..., tuple[Generate, Facts]]) -> None:
    """A worker's main loop. `open_model` takes the settings; what it tells of itself answers the first request."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where answers go
    generate: Generate | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if generate is None:
                generate, answer = open_model(**message)
            else:
                answer = vars(generate(Request(**message)))
        except Exception as error:  # whatever a library raises is the answer
            traceback.print_exc()
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A peer's process, and our end of the conversation. Whatever goes wrong is one OmniDraftError."""

    def __init__(
        self, name: str, command: Sequence[str], settings: Mapping[str, Any], seconds: float = SECONDS
    ) -> None:
        """Starts it and opens the model; `facts` is what it tells of itself. `seconds`: how long an answer may take.

        Its libraries take the number of threads from `settings` too, where they read it from the environment.
        """
        self.name, self._seconds, self._late = name, seconds, False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"]), "PYTHONIOENCODING": "utf-8"}
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=environment, encoding="utf-8", start_new_session=True,  # Ctrl-C is for the bench, which closes it
        )  # fmt: skip
        try:
            self.facts: Facts = self._call(settings)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request) -> Answer:
        """Raises OmniDraftError if the peer fails, or gives no answer in time."""
        found = self._call(vars(request))
        return Answer(**{field.name: found[field.name] for field in fields(Answer)})

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what a dead process has not read
                if stream is not None:
                    stream.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        timer = threading.Timer(self._seconds, self._expire)
        timer.start()
        answer: dict[str, Any] | None = None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        except (OSError, ValueError):  # a broken pipe, or the end of its output
            raise OmniDraftError(f"{self.name}: {self._obituary()}") from None
        finally:
            timer.cancel()
            if answer is None:  # after Ctrl-C too: the next answer would be that of this request
                self._process.kill()
        if "error" in answer:
            raise OmniDraftError(f"{self.name}: {answer['error']}")
        return answer

    def _expire(self) -> None:
        self._late = True
        self._process.kill()

    def _obituary(self) -> str:
        if self._late:
            return f"its process gave no answer for {self._seconds:g} s"
        status = self._process.wait(5.0)
        how = f"died of signal {-status}" if status < 0 else f"stopped with status {status}"
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return f"its process {how}" + (f" ({said[-1].strip()[:300]})" if said else "")
