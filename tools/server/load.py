"""Many clients at once, some of them rude: python -m omnidraft.tools.server.load URL --minutes 5 --clients 16.

Every request must be answered as it deserves, or be cut by its own client; equal greedy requests must get equal texts;
the server's memory must stay flat, also while it learns. Exit status 1 if not.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import monotonic
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.cli import guarded
from omnidraft.tools.server.mix import BUSY, KINDS, PROMPTS, Kind, text_of
from omnidraft.tools.server.probe import Reply, Site

OUTCOMES = ("answered", "busy", "cut", "wrong", "lost")
MOST_GROWTH = 0.1  # of resident memory, from the second fifth of the time to the last one; what is learned has bounds
RESIDENT = "process_resident_memory_bytes"
COMPLETED = "omnidraft_completion_tokens_total"


@dataclass
class Found:
    """What became of the requests. `complaints`: one line for each that went wrong or was lost.

    `samples`: [seconds, resident bytes, tokens emitted so far], as the server says, in the course of time.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {kind.name: Counter() for kind in KINDS})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind.name: [] for kind in KINDS})
    texts: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All of them."""
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    @property
    def growth(self) -> float | None:
        """Resident memory of the last fifth of the time over that of the second fifth, less 1; the first warms up.

        None after a short time, or where the server does not tell.
        """
        fifth = len(self.samples) // 5
        memory = [sample[1] for sample in self.samples]
        warm = median(memory[fifth : 2 * fifth]) if fifth else 0
        return median(memory[-fifth:]) / warm - 1 if warm else None

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together, as the server counts."""
        (begin, _, first), (end, _, last) = self.samples[0], self.samples[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

    def judge(self, kind: Kind, prompt: str, reply: Reply | None) -> tuple[str, str]:
        """The outcome of a request, with a complaint where there is one."""
        if reply is None:
            return "cut", ""
        if reply.status == BUSY and not kind.early:
            return "busy", ""
        if reply.status != kind.status:
            return "wrong", f"status {reply.status}, not {kind.status}: {reply.body[:200]!r}"
        if kind.status != 200:
            return "answered", ""
        try:
            text = text_of(reply)
        except (ValueError, LookupError) as error:
            return "wrong", f"{type(error).__name__}: {error}"
        if text != self.texts.setdefault(prompt, text):
            return "wrong", f"{text[:80]!r}, and another time {self.texts[prompt][:80]!r}"
        return "answered", ""


async def attack(site: Site, clients: int, seconds: float, requests: int, tokens: int, seed: int) -> Found:
    """Let clients ask until the time or the number of requests is up."""
    found, end = Found(), monotonic() + seconds
    watch = asyncio.create_task(_watch(site, found))

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while monotonic() < end and found.requests < requests:
            kind = rng.choices(KINDS, [kind.share for kind in KINDS])[0]
            if await _one(site, found, kind, rng.choice(PROMPTS), tokens) == "busy":
                await asyncio.sleep(1)

    await asyncio.gather(*(client(number) for number in range(clients)))
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    found.samples.append(await _sample(site))
    return found


async def _one(site: Site, found: Found, kind: Kind, prompt: str, tokens: int) -> str:
    began = monotonic()
    try:
        outcome, complaint = found.judge(kind, prompt, await site.send(kind.make(site, prompt, tokens), kind.manners))
    except OSError as error:
        outcome, complaint = "lost", f"{type(error).__name__}: {error}"
    found.outcomes[kind.name][outcome] += 1
    found.seconds[kind.name].append(monotonic() - began)
    if complaint:
        found.complaints.append(f"{kind.name}: {complaint}")
    return outcome


async def _watch(site: Site, found: Found) -> None:
    while True:
        found.samples.append(await _sample(site))
        await asyncio.sleep(1)


async def _get(site: Site, path: str) -> str:
    reply = await site.send(site.request("GET", path))
    assert reply is not None
    return reply.body.decode()


async def _sample(site: Site) -> tuple[float, float, float]:
    text = await _get(site, "/metrics")

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    return monotonic(), total(RESIDENT), total(COMPLETED)


def _table(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kind", no_wrap=True)
    for column in (*OUTCOMES, "median s", "95 % s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, counts in found.outcomes.items():
        seconds = found.seconds[name]
        times = [median(seconds), quantiles(seconds, n=20)[-1]] if len(seconds) > 1 else []
        table.add_row(name, *(str(counts[outcome]) for outcome in OUTCOMES), *(f"{time:.2f}" for time in times))
    return table


def load(
    url: Annotated[str, typer.Argument(help="Of the server, as it says when it starts.")],
    model: Annotated[str | None, typer.Option(help="Which to ask. [default: the first]")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="How long.")] = 5.0,
    clients: Annotated[int, typer.Option(min=1, max=256, help="How many at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 48,
    api_key: Annotated[str | None, typer.Option(envvar="OMNIDRAFT_API_KEY", help="That the server wants.")] = None,
    seed: Annotated[int, typer.Option(help="Of what the clients do.")] = 0,
) -> None:
    """Load a server with many clients, and say whether it bore them."""
    found = asyncio.run(_load(url, model, minutes, clients, tokens, api_key, seed))
    console = Console()
    console.print(_table(found))
    print(f"{found.requests} requests of {clients} clients; {found.tokens_per_second:.1f} tokens/s in all")
    if found.growth is not None:
        print(f"resident memory {found.samples[-1][1] / 2**20:.0f} MB, {found.growth:+.1%} since it was warm")
    for line in found.complaints[:10]:
        print(line)
    if found.complaints:
        raise OmniDraftError(f"{len(found.complaints)} requests went wrong or were lost")
    if found.growth is not None and found.growth > MOST_GROWTH:
        raise OmniDraftError("the server's memory grew")


async def _load(
    url: str, model: str | None, minutes: float, clients: int, tokens: int, key: str | None, seed: int
) -> Found:
    first = Site(url.rstrip("/"), "", key)
    try:
        reply = await first.send(first.request("GET", "/v1/models"))
    except OSError as error:
        raise OmniDraftError(f"{url}: {error}; start one with omnidraft serve BUNDLE") from None
    if reply is None or reply.status != 200:
        raise OmniDraftError(f"{url}: {'no answer' if reply is None else reply.body.decode(errors='replace')[:200]}")
    model = model or str(json.loads(reply.body)["data"][0]["id"])
    return await attack(Site(first.url, model, key), clients, 60 * minutes, 10**9, tokens, seed)


if __name__ == "__main__":
    typer.run(guarded(load))
