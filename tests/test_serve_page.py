"""The chat page in a real browser: the engine's text, coloured by who proposed it, with nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NOWHERE, TARGETS
from servers import Server, serving
from test_web import CHROMIUM, NAMES, modules, needs_node, node  # noqa: F401

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling

pytestmark = [pytest.mark.model, pytest.mark.slow, needs_node, pytest.mark.usefixtures("modules")]
KEY = "a key for tests"
FIRST, SECOND = "Name a colour of the rainbow.", "Tom has 3 apples and buys 4 more. How many apples does he have?"
GREEDY = {"temperature": "0", "budget": "24"}


@pytest.fixture
def server(bundle: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(bundle, tmp_path, "--target", "qwen3", "--draft", "3", key=KEY) as running:
        yield running
        assert running.complaints == ""


def visit(server: Server, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows after each step (see chat_page.mjs)."""
    if CHROMIUM is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and OMNIDRAFT_CHROMIUM names none")
    found: dict[str, Any] = node("chat_page.mjs", CHROMIUM, server.url, given=steps)
    assert found["errors"] == []
    assert all(request.startswith((server.url, "data:")) for request in found["requests"]), found["requests"]
    return found


def plain(bundle: Path, target: str, turns: list[str]) -> list[str]:
    """The answers of plain decoding to a conversation."""
    engine = Engine.open(bundle, target, options=Options("off"), state=NOWHERE, threads=2)
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = engine.generate(messages, sampling=Sampling(), max_new_tokens=24).text
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def test_a_chat_with_targets_and_learning_switched(server: Server, bundle: Path, tmp_path: Path) -> None:
    begin = {"set": {"key": KEY}}
    chat = [{"set": {**GREEDY, "target": "qwen3"}, "say": FIRST}, {"say": SECOND}]
    learn = [{"click": "learn"}, {"say": FIRST}]
    other = [{"click": "reset"}, {"set": {"target": "smollm2"}, "say": SECOND}]
    found = visit(server, [begin, *chat, *learn, *other])
    assert found["start"]["key_wanted"] and "key" in found["start"]["state"]
    opened, first, second, learning, third, new, last = found["after"]
    assert opened["phase"] == "ready" and opened["targets"] == list(TARGETS) and not opened["learning"]
    said = plain(bundle, "qwen3", [FIRST, SECOND, FIRST])
    assert [turn["text"] for turn in third["turns"]] == [FIRST, said[0], SECOND, said[1], FIRST, said[2]]
    assert [turn["text"] for turn in last["turns"]] == [SECOND, *plain(bundle, "smollm2", [SECOND])]
    assert new["turns"] == []
    for shown in (first, second, third, last):
        answer = shown["turns"][-1]
        drafted = [text for text, coloured in answer["pieces"] if coloured]
        assert 0 < len(drafted) <= int(answer["counts"]["accepted"]) <= int(answer["counts"]["proposed"])
        assert len(drafted) < len(answer["pieces"])
        assert answer["colour"] not in (None, "rgba(0, 0, 0, 0)")
        assert all(word in shown["state"] for word in ("tokens/s", "acceptance rate", "exact"))
        live = [line for line in shown["live"] if "tokens/s" in line]
        assert len(live) > 3, "figures while it streams"
    assert learning["learning"] and server.ask("/learning").json == {"on": True}
    assert list((tmp_path / "state/answers").iterdir())


def test_an_answer_can_be_stopped_and_what_is_wrong_is_said(server: Server) -> None:
    bad = {"set": {"temperature": "-1"}, "say": FIRST}
    long = {"set": {"temperature": "1", "seed": "1", "budget": "1500", "target": "smollm2"}}
    stopped = {"say": "Tell me a very long story about three cats.", "stop": True}
    found = visit(server, [{"set": {"key": "wrong"}}, {"set": {"key": KEY}}, bad, long, stopped])
    wrong, right, refused, _, cut = found["after"]
    assert (wrong["phase"], right["phase"]) == ("failed", "ready")
    assert "temperature must be" in refused["state"] and refused["turns"] == []
    assert cut["state"] == "stopped" and len(cut["turns"]) == 2 and cut["turns"][1]["text"]
    server.until(lambda health: not health["running"])
