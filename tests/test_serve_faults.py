"""omnidraft serve where things go wrong: full queues, clients that leave, signals, crashes, and a crowd of clients."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from conftest import NOWHERE
from servers import CHAT, Server, serving
from test_cli import fails

from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.tools.server.load import attack
from omnidraft.tools.server.mix import KINDS, PROMPTS
from omnidraft.tools.server.probe import Site

pytestmark = pytest.mark.model
STORY = "Tell me a very long story about three cats and their legs."
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
SLOW = ("--precision", "fp32", "--draft", "off", "--no-state")  # some ten tokens/s
LONG = 1500


@pytest.fixture(scope="module")
def slow(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers take long, and with room for one request to wait."""
    with serving(bundle, tmp_path_factory.mktemp("slow"), *SLOW, "--queue", "1") as running:
        yield running
        assert running.complaints == ""


def begin(server: Server, prompt: str = QUESTION, tokens: int = LONG, **more: Any) -> HTTPConnection:
    """A request whose answer nobody has read yet."""
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}
    connection = HTTPConnection(server.host, timeout=60)
    body = json.dumps({**asked, "max_tokens": tokens})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    return connection


def answering(connection: HTTPConnection) -> HTTPResponse:
    """Its answer, of which the first line has come."""
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return response


def hang_up(connection: HTTPConnection, response: HTTPResponse | None = None) -> None:
    if response is not None:
        response.close()
    connection.close()


def cancelled(server: Server) -> float:
    name = 'omnidraft_answers_total{finish_reason="cancelled",model="smollm2"} '
    lines = server.ask("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_a_full_queue_says_so_and_a_client_that_leaves_makes_room(slow: Server) -> None:
    """The first answer would take minutes; its client leaves, so the one that waited is answered."""
    before = cancelled(slow)
    running = begin(slow, stream=True)
    stream = answering(running)
    waiting = begin(slow, tokens=3)
    slow.until(lambda health: health["waiting"] == 1)
    refused = slow.chat("smollm2", QUESTION, max_tokens=3)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    hang_up(running, stream)
    with closing(waiting):
        assert json.load(waiting.getresponse())["usage"]["completion_tokens"] == 3
    assert cancelled(slow) == before + 1


def test_a_client_that_leaves_the_queue_is_never_answered(slow: Server) -> None:
    before = cancelled(slow)
    running = begin(slow, stream=True)
    stream = answering(running)
    waiting = begin(slow)
    slow.until(lambda health: health["waiting"] == 1)
    hang_up(waiting)
    slow.until(lambda health: health["running"] and health["waiting"] == 0)
    hang_up(running, stream)
    slow.until(lambda health: not health["running"])
    assert cancelled(slow) == before + 1  # the running one alone


def test_a_client_that_waits_for_the_whole_answer_may_leave_too(slow: Server) -> None:
    before = cancelled(slow)
    running = begin(slow)
    slow.until(lambda health: health["running"])
    hang_up(running)
    slow.until(lambda health: not health["running"])
    assert cancelled(slow) == before + 1
    assert slow.chat("smollm2", QUESTION, max_tokens=2).status == 200


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_running_answer_end(bundle: Path, tmp_path: Path, stop: signal.Signals) -> None:
    expected = Engine.open(bundle, "smollm2", "fp32", Options("off"), NOWHERE, threads=2)
    text = expected.generate(QUESTION, sampling=Sampling(), max_new_tokens=40).text
    with serving(bundle, tmp_path, *SLOW) as server:
        running = begin(server, tokens=40, stream=True)
        stream = answering(running)
        waiting = begin(server)
        server.until(lambda health: health["waiting"] == 1)
        server.process.send_signal(stop)
        told = waiting.getresponse()
        assert told.status == 503 and json.load(told)["error"]["code"] == "stopping"
        *events, done = stream.read().decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
        assert server.process.wait(60) == 0
        assert server.complaints == ""
        with pytest.raises(ConnectionRefusedError):
            begin(server)


def test_a_running_answer_is_cut_when_its_time_is_up(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path, *SLOW, "--grace", "0") as server:
        running = begin(server, stream=True)
        stream = answering(running)
        assert server.end(signal.SIGTERM) == 0
        *_, last, end = stream.read().decode().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping" and end == ""


def said(server: Server, prompt: str) -> str:
    """By the quick target."""
    return str(server.chat("qwen3", prompt, max_tokens=40).json["choices"][0]["message"]["content"])


def entries(state: Path) -> int:
    (file,) = state.rglob("ngram_cache.json")
    return len(json.loads(file.read_text())["payload"]["entries"])


def test_a_crash_and_a_new_start_lose_nothing_and_learning_changes_no_text(bundle: Path, tmp_path: Path) -> None:
    """Killed in an answer: what earlier ones taught is there, and texts are those of a server that does not learn."""
    options = ("--target", "qwen3", "--draft", "3")
    with serving(bundle, tmp_path, *options, "--learn", "on") as server:
        texts = [said(server, prompt) for prompt in PROMPTS]
        known = entries(tmp_path / "state")
        running = begin(server, STORY, 900, model="qwen3", stream=True)
        answering(running)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        running.close()
    assert entries(tmp_path / "state") >= known > 0
    assert list((tmp_path / "state").rglob("answers/*.json")), "it learned from answers"
    with serving(bundle, tmp_path, *options, "--learn", "off") as server:
        assert [said(server, prompt) for prompt in PROMPTS] == texts
        assert server.complaints == "", "the state was whole"


def test_learning_is_switched_between_answers(bundle: Path, tmp_path: Path) -> None:
    answers = tmp_path / "state" / "answers"
    with serving(bundle, tmp_path, "--target", "qwen3", "--draft", "3") as server:
        assert server.ask("/learning").json == {"on": False}
        before = said(server, QUESTION)
        assert not answers.exists()
        assert server.ask("/learning", {"on": True}, "PUT").json == {"on": True} == server.ask("/learning").json
        assert said(server, QUESTION) == before
        assert answers.exists()
        assert server.ask("/learning", {"on": False}, "PUT").json == {"on": False}
        kept = [path.read_bytes() for path in answers.iterdir()]
        assert said(server, PROMPTS[0]) != before
        assert [path.read_bytes() for path in answers.iterdir()] == kept


def test_learning_needs_a_state(slow: Server) -> None:
    refused = slow.ask("/learning", {"on": True}, "PUT")
    assert refused.status == 400 and "state folder" in refused.error["message"]
    assert slow.ask("/learning").json == {"on": False}


def linked(source: str, copy: str) -> None:
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copyfile(source, copy)


def test_a_target_that_is_damaged_is_named_and_the_others_answer(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy", copy_function=linked))
    damaged = copy / open_bundle(copy).targets["smollm2"].map
    damaged.unlink()
    damaged.write_bytes(b"{}")
    with serving(copy, tmp_path, "--target", "qwen3", "--draft", "3", "--no-state") as server:
        for _ in range(2):
            failed = server.chat("smollm2", QUESTION, max_tokens=4)
            assert (failed.status, failed.error["type"]) == (500, "server_error")
            assert damaged.name in failed.error["message"]
        assert server.chat("qwen3", QUESTION, max_tokens=4).status == 200


def test_a_start_that_cannot_be_is_refused_in_one_line(bundle: Path, tmp_path: Path) -> None:
    assert "give --api-key" in fails("serve", bundle, "--host", "0.0.0.0", "--port", "0", "--no-state")
    assert "no target" in fails("serve", bundle, "--port", "0", "--target", "nobody", "--no-state")
    assert "no precision" in fails("serve", bundle, "--port", "0", "--precision", "int3", "--no-state")
    assert "--api-key" in fails("serve", bundle, "--port", "0", "--api-key", "", "--no-state")
    assert "--learn on needs a state" in fails("serve", bundle, "--learn", "on", "--no-state")
    assert "no such bundle" in fails("serve", tmp_path / "nothing", "--port", "0", "--no-state")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}: " in fails("serve", bundle, "--port", port, "--no-state")


def test_a_crowd_is_answered_and_the_state_stays_whole(bundle: Path, tmp_path: Path) -> None:
    """Sixteen clients, good, slow, rude and wrong ones: each is answered as it deserves, or has left by itself."""
    with serving(bundle, tmp_path, "--target", "qwen3", "--draft", "3", "--learn", "on", "--queue", "12") as server:
        found = asyncio.run(attack(Site(server.url, "qwen3"), 16, 120, 320, 24, seed=1))
        assert found.complaints == []
        assert found.requests >= 320 and all(sum(found.outcomes[kind.name].values()) for kind in KINDS)
        total = {name: sum(counts[name] for counts in found.outcomes.values()) for name in ("wrong", "lost", "cut")}
        assert (total["wrong"], total["lost"]) == (0, 0) and total["cut"] > 0
        assert found.outcomes["whole"]["answered"] and found.outcomes["slow reader"]["answered"]
        assert set(found.texts) == set(PROMPTS)
        server.until(lambda health: not health["running"] and health["waiting"] == 0)
        assert server.end(signal.SIGTERM) == 0 and server.complaints == ""
    plain = Engine.open(bundle, "qwen3", options=Options("off"), state=NOWHERE, threads=2)
    for prompt, text in found.texts.items():
        assert text == plain.generate(prompt, sampling=Sampling(), max_new_tokens=24).text
    Engine.open(bundle, "qwen3", options=Options("3"), state=State(tmp_path / "state", pytest.fail))
    assert entries(tmp_path / "state") > 0


class Liar(BaseHTTPRequestHandler):
    """Answers everything with 200, and nothing twice alike."""

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "liar"}], "on": False}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps({"choices": [{"message": {"content": str(id(self))}}]}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def liar() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_load_command_prints_a_table_and_fails_where_the_server_does(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "omnidraft.tools.server.load"]
    with serving(bundle, tmp_path, "--target", "qwen3", "--draft", "3", "--no-state") as server:
        options = ("--minutes", "0.05", "--clients", "4", "--tokens", "8", "--model", "qwen3")
        done = run([*command, server.url, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "slow reader" in done.stdout and "tokens/s in all" in done.stdout
    gone = run([*command, server.url], capture_output=True, text=True, timeout=60)
    assert gone.returncode == 1 and "omnidraft serve BUNDLE" in gone.stderr
    with liar() as url:
        lied = run([*command, url, *options], capture_output=True, text=True, timeout=120)
        assert lied.returncode == 1 and "went wrong or were lost" in lied.stderr, lied.stdout
