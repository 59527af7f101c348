"""JSONL rows of prompts and of answers: read with complaints, appended so that a kill loses one line at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.untrusted import parse_json

HELD_OUT = 24  # one prompt of so many is never trained on
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Prompt:
    """A question for the target."""

    id: str
    task: str
    prompt: str


@dataclass(frozen=True)
class Row:
    """A prompt with an answer. `temperature` None: a data set's reference, which no target wrote."""

    id: str
    task: str
    prompt: str
    answer: str
    temperature: float | None
    finished: bool

    @property
    def is_greedy(self) -> bool:
        """Whether a target's greedy decoding wrote the answer."""
        return self.temperature == 0


def digest(*parts: object) -> int:
    """A 64-bit number of some values, the same on every machine and in every run."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for validation only. It depends on the prompt alone: text that is added later,
    and a second answer to the same prompt, change nothing."""
    return digest(prompt.strip()) % HELD_OUT == 0


def read_prompts(paths: Iterable[Path]) -> tuple[list[Prompt], list[str]]:
    """Prompts (`prompt`, optionally `id` and `task`), and one complaint per line that has none."""

    def parse(value: dict[str, Any], name: str) -> Prompt:
        if not value["prompt"].strip():
            raise ValueError
        id, task, prompt = str(value.get("id", name)), str(value.get("task", "text")), str(value["prompt"])
        (id + task + prompt).encode()  # no half of a surrogate pair
        return Prompt(id, task, prompt)

    return _read(paths, parse, "prompt")


def read_rows(paths: Iterable[Path]) -> tuple[list[Row], list[str]]:
    """Rows with `prompt` and `response` (what a target answered) or `reference`, and the complaints.

    A response without a `temperature` is not taken for a greedy one.
    """

    def parse(value: dict[str, Any], name: str) -> Row:
        response = value.get("response")
        answer = response or value.get("reference")
        if not (isinstance(value["prompt"], str) and isinstance(answer, str)):
            raise ValueError
        id, task = str(value.get("id", name)), str(value.get("task", "text"))
        (id + task + value["prompt"] + answer).encode()  # no half of a surrogate pair
        temperature = float(value.get("temperature", 1)) if response else None
        if temperature is not None and not isfinite(temperature):
            raise ValueError
        return Row(id, task, value["prompt"], answer, temperature, bool(value.get("finished", True)))

    return _read(paths, parse, "prompt and response or reference")


def _read(
    paths: Iterable[Path], parse: Callable[[dict[str, Any], str], Parsed], wanted: str
) -> tuple[list[Parsed], list[str]]:
    rows, complaints = [], []
    for path in paths:
        try:
            lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        except OSError as error:
            raise OmniDraftError(f"{path}: cannot be read ({error.strerror}); give a JSONL file") from None
        for number, line in enumerate(lines if lines != [b""] else [], 1):
            try:
                rows.append(parse(parse_json(line), f"{path.stem}-{number}"))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                complaints.append(f"{path}:{number}: not an object with {wanted}; skipped")
    return rows, complaints


def drop_torn_line(path: Path) -> bool:
    """Cut off a last line that a kill left without its end; whether there was one."""
    if not path.is_file():
        return False
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        file.truncate(whole)
    return whole < len(content)


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add answers of a target to a JSONL file, each line whole before the next begins."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            value = {
                "id": row.id, "task": row.task, "prompt": row.prompt, "response": row.answer,
                "temperature": row.temperature, "finished": row.finished,
            }  # fmt: skip
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
