"""A graph in ONNX Runtime's own format (.ort, a flat buffer), as far as it is looked at without a session.

Such a file holds its weights, so it reads no other; only a compiled context (EPContext) in it could name one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from omnidraft.runtime.errors import OmniDraftError

SUFFIX, MARK = ".ort", b"ORTM"
CONTEXT = b"EPContext"
MOST_VALUES, MOST_INPUTS, MOST_DIMENSIONS = 100_000, 10_000, 16  # of a graph, of a graph, of a value
MOST_TEXT = 4096  # bytes of a name

# Where ort.fbs keeps things: the numbers of a table's fields.
MODEL, GRAPH = 1, 7  # of the root, of Model
VALUES, INPUTS = 1, 5  # of Graph
NAME, TYPE = 0, 2  # of a value
KIND, CONTENT, TENSOR = 1, 2, 1  # of its type, and one of the kinds
SHAPE, DIMENSIONS, SIZE = 1, 0, 0  # of a tensor, of its shape, of a dimension
SAYS, NUMBER, SYMBOL = 0, 1, 2  # of a size: which of the others it has, by their numbers here

Shape = tuple[int | str, ...]


def is_ort_format(model: Path) -> bool:
    """Whether ONNX Runtime takes a file for one of this format, which it does by the name."""
    return model.suffix.lower() == SUFFIX


def inputs(model: Path, unknown: str) -> dict[str, Shape]:
    """Name → shape of every input, as `graph_inputs`; `unknown` stands for a dimension of which nothing is said.

    Raises OmniDraftError for a file that is not of this format; OSError.
    """
    try:
        with _opened(model) as data:
            graph = _Table.root(data).table(MODEL).table(GRAPH)
            wanted = list(graph.texts(INPUTS, MOST_INPUTS))
            chosen = set(wanted)
            named = ((value.text(NAME), value) for value in graph.tables(VALUES, MOST_VALUES))
            values = {name: value for name, value in named if name in chosen}
            return {name: _shape(values[name].table(TYPE), unknown) for name in wanted}
    except (ValueError, LookupError, struct.error):
        raise _not_one(model) from None


def check_alone(model: Path) -> None:
    """Raise OmniDraftError for a file that is not of this format, or holds what could name another file; OSError."""
    try:
        with _opened(model) as data:
            compiled = data.find(CONTEXT) >= 0
    except ValueError:
        raise _not_one(model) from None
    if compiled:
        raise OmniDraftError(f"{model}: holds a compiled graph, which ORT format is not for here; do not use it")


def _not_one(model: Path) -> OmniDraftError:
    return OmniDraftError(f"{model}: not a graph in ORT format; pack again")


def _opened(model: Path) -> mmap.mmap:
    """Raises ValueError for a file that does not say that it is one of this format."""
    with model.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if data[4:8] != MARK:
        data.close()
        raise ValueError
    return data


def _shape(kind: _Table, unknown: str) -> Shape:
    """Of a tensor that says its shape; of anything else, that of a number."""
    if kind.byte(KIND) != TENSOR or not kind.table(CONTENT).has(SHAPE):
        return ()
    dimensions = kind.table(CONTENT).table(SHAPE).tables(DIMENSIONS, MOST_DIMENSIONS)
    return tuple(_size(dimension.table(SIZE), unknown) for dimension in dimensions)


def _size(size: _Table, unknown: str) -> int | str:
    if size.byte(SAYS) == NUMBER:
        return size.number(NUMBER)
    return size.text(SYMBOL) if size.byte(SAYS) == SYMBOL else unknown


class _Table:
    """A table of a flat buffer. What lies outside the file, or is longer than it may be, raises as in `inputs`."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - _read(data, at, "<i")

    @classmethod
    def root(cls, data: mmap.mmap) -> _Table:
        return cls(data, _read(data, 0, "<I"))

    def table(self, field: int) -> _Table:
        return _Table(self._data, _target(self._data, self._place(field)))

    def tables(self, field: int, most: int) -> Iterator[_Table]:
        return (_Table(self._data, _target(self._data, at)) for at in self._elements(field, most))

    def text(self, field: int) -> str:
        return _text(self._data, _target(self._data, self._place(field)))

    def texts(self, field: int, most: int) -> Iterator[str]:
        return (_text(self._data, _target(self._data, at)) for at in self._elements(field, most))

    def byte(self, field: int) -> int:
        return _read(self._data, self._place(field), "<B") if self.has(field) else 0

    def number(self, field: int) -> int:
        return _read(self._data, self._place(field), "<q") if self.has(field) else 0

    def has(self, field: int) -> bool:
        room = _read(self._data, self._fields, "<H")
        return 4 + 2 * field < room and _read(self._data, self._fields + 4 + 2 * field, "<H") != 0

    def _place(self, field: int) -> int:
        if not self.has(field):
            raise LookupError(field)
        return self._at + _read(self._data, self._fields + 4 + 2 * field, "<H")

    def _elements(self, field: int, most: int) -> range:
        """Where the elements of a list stand; a list that is not there has none."""
        if not self.has(field):
            return range(0)
        begin = _target(self._data, self._place(field))
        size = _read(self._data, begin, "<I")
        if size > most:
            raise ValueError(size)
        return range(begin + 4, begin + 4 + 4 * size, 4)


def _read(data: mmap.mmap, at: int, kind: str) -> int:
    if at < 0:
        raise ValueError(at)
    found: int = struct.unpack_from(kind, data, at)[0]
    return found


def _target(data: mmap.mmap, at: int) -> int:
    return at + _read(data, at, "<I")


def _text(data: mmap.mmap, at: int) -> str:
    size = _read(data, at, "<I")
    if size > MOST_TEXT:
        raise ValueError(size)
    return data[at + 4 : at + 4 + size].decode()
