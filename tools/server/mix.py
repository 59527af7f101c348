"""What clients do to a server, well-behaved or not, and what it has to answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omnidraft.tools.server.gate import MOST_BYTES
from omnidraft.tools.server.probe import Manners, Reply, Site

CHAT = "/v1/chat/completions"
BUSY = 429
POLITE = Manners()
PROMPTS = (
    "Why is the sky blue?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Write a haiku about rain.",
    "Name three colours.",
)


@dataclass(frozen=True)
class Kind:
    """`make`: the request for a site, a prompt and a number of tokens; `status`: of the answer that is due.

    `share`: how often, among all. A client whose manners have a `most` hangs up. `early`: answered in front of the
    queue, so never with BUSY.
    """

    name: str
    make: Callable[[Site, str, int], bytes]
    status: int
    share: int
    manners: Manners = POLITE
    early: bool = False


def text_of(reply: Reply) -> str:
    """The text of an answer, whole or streamed. Raises ValueError for one that is not as it should be."""
    if not reply.body.startswith(b"data: "):
        return str(json.loads(reply.body)["choices"][0]["message"]["content"])
    *events, done, rest = reply.body.decode().split("\n\n")
    if done != "data: [DONE]" or rest:
        raise ValueError(f"the stream ends with {done[:80]!r}")
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def _chat(**more: Any) -> Callable[[Site, str, int], bytes]:
    def make(site: Site, prompt: str, tokens: int) -> bytes:
        asked = {"model": site.model, "messages": [{"role": "user", "content": prompt}]}
        return site.post(CHAT, {**asked, "temperature": 0, "max_tokens": tokens, **more})

    return make


def _body(body: bytes) -> Callable[[Site, str, int], bytes]:
    return lambda site, prompt, tokens: site.request("POST", CHAT, body)


KINDS = (
    Kind("whole", _chat(), 200, 6),
    Kind("streamed", _chat(stream=True), 200, 6),
    Kind("slow reader", _chat(stream=True), 200, 4, Manners(size=512, pause=0.05)),
    Kind("leaves at once", _chat(), 200, 2, Manners(most=0)),
    Kind("leaves in the middle", _chat(stream=True), 200, 3, Manners(size=512, most=1024)),
    Kind("not JSON", _body(b'{"model": '), 400, 2, early=True),
    Kind("unsupported", _chat(tools=[{"type": "function"}]), 400, 2, early=True),
    Kind("unknown model", _chat(model="nobody"), 404, 2, early=True),
    Kind("too long", lambda site, prompt, _: _chat()(site, prompt, 10_000_000), 400, 1),
    Kind("too large", _body(b" " * (2 * MOST_BYTES)), 413, 1, early=True),
    Kind("not HTTP", lambda *_: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400, 1, early=True),
)
