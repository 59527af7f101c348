"""W₀: the smallest number of rows from which a row's logits do not depend on how many there are.

The promise that drafting leaves the text untouched, bit for bit, rests on it (DESIGN.md section 4).
It is a property of graph, ONNX Runtime build, device and thread count, so it is measured, not assumed.
"""

from __future__ import annotations

import os
import platform

import numpy as np
import onnxruntime as ort

from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.decoder import prefill

ROWS = 17  # one more than the longest draft
WIDEST = 4
PASTS = (37, 150)
CHUNK = 64  # rows of a prefill pass


def probe(decoder: CausalModel, context: int) -> int | None:
    """Measure W₀ on a target graph of so many positions, None if rows vary up to width 4. Takes about a second.

    Seventeen tokens behind each of two pasts are fed in one pass and in passes of w and w + 1 rows;
    W₀ is the smallest w with logits equal bit for bit everywhere. A context that holds no past but these rows has none.
    """
    room = context - ROWS - 2 * WIDEST
    if room < 1:
        return None
    pasts = [min(past, room) for past in PASTS]
    decoder.reserve(max(pasts) + ROWS + 2 * WIDEST)
    rng = np.random.default_rng(0)
    alive = list(range(1, WIDEST + 1))
    for past in pasts:
        ids = rng.integers(0, decoder.vocabulary, past + ROWS).tolist()
        decoder.rollback(0)
        prefill(decoder, ids[:past], CHUNK, WIDEST)
        whole = decoder.run(ids[past:]).copy()
        alive = [w for w in alive if all(_equal(decoder, ids[past:], past, width, whole) for width in (w, w + 1))]
    decoder.rollback(0)
    return alive[0] if alive else None


def chunks_agree(decoder: CausalModel, context: int, width: int) -> bool:
    """Whether rows of a prefill pass have the bits that passes of `width` rows give them, wherever they stand in it.

    Then rows of an earlier response can stand for those of a prompt that begins as it did, whose last pass may be of
    any number of rows: every graph that it could take is asked. Takes about a second.
    False where the context holds too little to tell.
    """
    past = PASTS[-1]
    if past + ROWS + WIDEST > context:
        return False
    decoder.reserve(past + ROWS + WIDEST)
    ids = np.random.default_rng(1).integers(0, decoder.vocabulary, past + ROWS).tolist()
    least = max(WIDEST, width)
    wide = {ROWS, CHUNK, *(rows for rows in decoder.widths if ROWS < rows < CHUNK)}
    narrow = {width, *(rows for rows in decoder.widths if width < rows < ROWS)}
    found = []
    for rows in wide:
        decoder.rollback(0)
        prefill(decoder, ids[:-rows], CHUNK, least)
        found.append(decoder.run(ids[-rows:])[-ROWS:].copy())
    decoder.rollback(0)
    prefill(decoder, ids[:past], CHUNK, least)
    agree = all(np.array_equal(other, found[0]) for other in found)
    agree = agree and all(_equal(decoder, ids[past:], past, rows, found[0]) for rows in narrow)
    decoder.rollback(0)
    return agree


def _equal(decoder: CausalModel, ids: list[int], past: int, width: int, whole: np.ndarray) -> bool:
    decoder.rollback(past)
    for begin in range(0, ROWS, width):
        rows = ids[begin : begin + width]
        padded = rows + [ids[0]] * (width - len(rows))
        if not np.array_equal(decoder.run(padded)[: len(rows)], whole[begin : begin + len(rows)]):
            return False
    return True


def fingerprint(weights_sha256: str, threads: int, provider: str) -> str:
    """What W₀ depends on, as one line: graph, ONNX Runtime, device, threads, execution provider."""
    device = f"{platform.system()} {platform.machine()} {processor()}"
    return f"{weights_sha256[:16]} | onnxruntime {ort.__version__} | {device} | {threads} threads | {provider}"


def processor() -> str:
    """Name and number of this machine's cores."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith(("model name", "CPU part"))]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor()} x{os.cpu_count()}"
