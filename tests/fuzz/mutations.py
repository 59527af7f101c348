"""Inputs that nobody would write: seeds of a corpus, changed as bytes, as text and as JSON. Deterministic by number."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LONGEST = 1 << 16  # bytes of an input
NUMBERS = [
    0, 1, -1, 2, 7, 63, 64, 65, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    0.5, 1.0, 3.0, -0.0, 5e-324, 1e308, -1e308,
]  # fmt: skip
TEXTS = [
    "", " ", "a", "\x00", "\x1b[2J", "\n", "\u2028", "\ud800", "\udcff", "é", "▁", "😀", "..",
    "../../etc/passwd", "/etc/passwd", "a/../b", "C:\\x", "NaN", "1e999", "<|end|>", "{{ x }}", "%s%n", "a" * 300,
    "9" * 5000, "AAAA", "=",
]  # fmt: skip
FRAGMENTS = [
    b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"true", b"NaN", b"Infinity", b"-", b"1e999", b"9" * 400,
    b"\\ud800", b"[" * 500, b'{"a":' * 500, b"\x00", b"\xff", b"\x80", b"\xc0\xaf", b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x00\x00\x00\x80", b"\xff" * 10, b"\x80" * 12 + b"\x01", b"\n", b"\r\n", b"\xef\xbb\xbf",
]  # fmt: skip
MARKUP = (Path(__file__).parent / "markup.txt").read_bytes().splitlines()  # pieces of templates

Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutated(rng: random.Random, corpus: Sequence[bytes], kind: str) -> bytes:
    """One input. `kind`: "json", "lines" (of JSON), "text" (a template) or "bytes"."""
    data = rng.choice(corpus)
    if rng.random() < 0.02:
        data = rng.randbytes(rng.randrange(64))
    structured = {"json": _json, "lines": _lines, "text": _text, "bytes": _number}[kind]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = structured if rng.random() < 0.75 else rng.choice(ANY)
        data = change(rng, data, corpus)
    return data[:LONGEST]


def _flip(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.choice((0, 1, 9, 127, 128, 255, rng.randrange(256)))]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(FRAGMENTS) + data[at:]


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.choice((1, 2, 4, 16, 200)))


def _delete(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def _repeat(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 50)) + data[end:]


def _cut(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = rng.choice(corpus)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _number(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Overwrite a place with a binary number, little-endian."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data) + 1) // size * size if rng.random() < 0.7 else rng.randrange(len(data) + 1)
    value = rng.choice((0, 1, 2, 3, 8, 16, 127, 128, 255, -1, -2, len(data), 1 << 31, 1 << 62, rng.getrandbits(64)))
    return data[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def _text(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Insert or replace some of a template's language."""
    begin, end = _span(rng, data)
    pieces = b"".join(rng.choice(MARKUP) for _ in range(rng.choice((1, 1, 2, 3, 5))))
    return data[:begin] + pieces + data[begin if rng.random() < 0.6 else end :]


def _json(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Change one value of a document, or where it is."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return rng.choice(ANY)(rng, data, corpus)
    holder = [document]
    parent, key = rng.choice(list(_places(holder, [])))
    value = parent[key]
    action = rng.randrange(9)
    if action < 4:
        parent[key] = _other(rng, value)
    elif action == 4:
        del parent[key]
    elif action == 5 and isinstance(value, list | str):
        parent[key] = value * rng.choice((2, 3, 20))
    elif action == 6:
        other, place = rng.choice(list(_places(holder, [])))
        parent[key] = json.loads(json.dumps(other[place]))
    elif action == 7 and isinstance(value, dict) and value:
        name = rng.choice(list(value))
        value[rng.choice([*TEXTS, name + "x"])] = value.pop(name) if rng.random() < 0.5 else value[name]
    elif isinstance(value, list) and value:
        rng.shuffle(value)
    return json.dumps(holder[0] if holder else None).encode()


def _lines(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json(rng, lines[at], corpus)
    return b"\n".join(lines)


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    for key in node if isinstance(node, dict) else range(len(node)):
        found.append((node, key))
        if isinstance(node[key], dict | list):
            _places(node[key], found)
    return found


def _other(rng: random.Random, value: Any) -> Any:
    """A value of the same kind, most often."""
    if isinstance(value, bool) or value is None or rng.random() < 0.3:
        return rng.choice([None, True, False, [], {}, [value], {"a": value}, *NUMBERS, *TEXTS])
    if isinstance(value, int | float):
        return rng.choice([*NUMBERS, value + 1, -value, float(min(max(value, -1e9), 1e9))])
    if isinstance(value, str):
        begin, end = sorted(rng.randrange(len(value) + 1) for _ in range(2))
        return rng.choice([value[:begin] + rng.choice(TEXTS) + value[end:], rng.choice(TEXTS), value[begin:end]])
    return rng.choice([value * 2 if isinstance(value, list) else {**value, "x": 1}, [], {}, [value, value]])


ANY: list[Change] = [_flip, _insert, _delete, _repeat, _cut, _splice, _number]
