"""A real server in a process of its own, on a free port, and the plainest of clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    said: Path
    key: str | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def complaints(self) -> str:
        """What is on its error stream."""
        return self.said.read_text()

    def ask(self, path: str, data: Any = None, method: str | None = None, **headers: str | None) -> Reply:
        """One exchange; `data` is sent as JSON, or as it stands if it is bytes. A header that is None is left out."""
        known = {"Content_Type": "application/json"} if data is not None else {}
        if self.key is not None:
            known["Authorization"] = f"Bearer {self.key}"
        body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
        request = Request(self.url + path, body, method=method)
        for name, value in {**known, **headers}.items():
            if value is not None:
                request.add_header(name.replace("_", "-"), value)
        try:
            with urlopen(request, timeout=120) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read().decode())
        except HTTPError as error:
            return Reply(error.code, dict(error.headers), error.read().decode())

    def chat(self, model: str, prompt: str, **more: Any) -> Reply:
        asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        return self.ask(CHAT, {**asked, **more})

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until /health says so."""
        end = time.monotonic() + 60
        while not holds(found := self.ask("/health").json):
            assert time.monotonic() < end, found
            time.sleep(0.02)

    def end(self, signal: int) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(signal)
        return self.process.wait(60)


@contextmanager
def serving(bundle: Path, folder: Path, *options: str | Path, key: str | None = None) -> Iterator[Server]:
    """Until the block ends, if it has not ended before. `folder`: for its state and what it complains of."""
    folder.mkdir(exist_ok=True)
    state = () if "--no-state" in options else ("--state", folder / "state")
    command = [sys.executable, "-m", "omnidraft.tools.cli", "serve", bundle, "--port", "0", "--threads", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "OMNIDRAFT_API_KEY"}
    if key is not None:
        environment["OMNIDRAFT_API_KEY"] = key
    said = folder / "stderr.txt"
    with said.open("w") as errors:
        process = subprocess.Popen(
            list(map(str, [*command, *state, *options])), stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("http"), said.read_text()
        yield Server(process, line.partition(": ")[0], said, key)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
