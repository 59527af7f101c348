"""Protocol buffer messages stepped through in place: where fields lie, without building anything of them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

Data = mmap.mmap | bytes
Span = tuple[int, int]
Field = tuple[int, int, int]

MOST_FIELDS = 4_000_000  # looked at for one question; an ONNX graph of ours has some ten thousand
MOST_TEXT = 4096  # bytes of a name


def find(data: Data, span: Span, field: int, *inner: int) -> Iterator[Span]:
    """Where the content of a field lies, or of fields inside it; a field may be there several times.

    Raises ValueError or IndexError for bytes that are no message.
    """
    for number, begin, end in fields(data, *span):
        if number == field and inner:
            yield from find(data, (begin, end), *inner)
        elif number == field:
            yield begin, end


def fields(data: Data, at: int, end: int) -> Iterator[Field]:
    """(number, begin, end) of each field of a message that lies from `at` to `end`. Raises as `find`."""
    for _ in range(MOST_FIELDS):
        if at >= end:
            return
        tag, at = number(data, at)
        kind = tag & 7
        if kind == 0:
            stop = number(data, at)[1]
        elif kind == 2:
            size, at = number(data, at)
            stop = at + size
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise ValueError(kind)
        if stop > end:
            raise ValueError(stop)
        yield tag >> 3, at, stop
        at = stop
    raise ValueError("too many fields")


def number(data: Data, at: int) -> tuple[int, int]:
    """(value, end) of a base-128 number of up to 64 bits. Raises as `find`."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number has too many bytes")


def text(data: Data, span: Span) -> str:
    """The text of a field. Raises ValueError for one that is too long for a name, or is no UTF-8."""
    begin, end = span
    if end - begin > MOST_TEXT:
        raise ValueError("a name is too long")
    return data[begin:end].decode()
