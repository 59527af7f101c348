"""The paper's tables in shape: the rows of OmniDraft (arXiv 2507.02659) on our pair, its cache and its eviction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from omnidraft.adapters.settings import RANK, Settings
from omnidraft.runtime.calibration import Calibration
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import THRESHOLD, Options
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.report import Report
from omnidraft.runtime.translation import Mode
from omnidraft.tools.contenders import engine_for, make_rows
from omnidraft.tools.learned import INTERLEAVED, JOINT, Learned, Variant, learn
from omnidraft.tools.measure import Row, measure, rows
from omnidraft.tools.paper_figures import PAPER, TASKS
from omnidraft.tools.tables import COLUMNS, Sheet

LENGTH = "4"  # k of the paper's ablation
DIRECT, CACHE, OURS = "SpD_DM", "+ n-gram cache", "ours: projected, cost"
PARTS = (4, 2)  # of the cache's entries that are kept in the ablation: a quarter, a half


@dataclass
class PaperExtras:
    """`caches`: entries and size of each task's n-gram cache; `evictions`: acceptance where it may hold fewer."""

    caches: list[dict[str, Any]] = field(default_factory=list)
    evictions: list[Row] = field(default_factory=list)


def check_lessons(tasks: Mapping[str, Any], lessons: Mapping[str, Any]) -> None:
    """Each task learns from its own prompts. Raises OmniDraftError for a task that has none."""
    for task in tasks:
        if task not in lessons:
            raise OmniDraftError(f"--paper learns each task from prompts of its own; --learn-from has none of {task!r}")


def variants() -> dict[str, Variant]:
    """How each row that learns does so; the paper's λ is ours too."""
    weight = Settings().weight
    return {
        "+ L_DM, LoRA": Variant(RANK, "paper", 0.0),
        "+ L_DM + λ L_N, LoRA": Variant(RANK, "paper", weight),
        "the same, rank 8": Variant(8, "paper", weight),
        "+ adaptive, joint": Variant(RANK, "paper", weight, JOINT),
        "+ adaptive, interleaved": Variant(RANK, "paper", weight, INTERLEAVED),
        OURS: Variant(RANK, "projected", weight, INTERLEAVED),
    }


def paper_rows(
    pair: Pair, calibration: Calibration, lessons: Sequence[str], arguments: Mapping[str, Any],
    advance: Callable[[], None],
) -> tuple[dict[str, Engine], dict[str, Learned]]:  # fmt: skip
    """Engines by row, plain decoding first, each with an empty cache; and what was learned for the rows that learn."""
    fixed = Options(LENGTH, mode=Mode.ONLINE)
    learned = learn(engine_for(pair, fixed, calibration), lessons, variants(), arguments, advance)
    found = make_rows(pair, [], calibration)
    found[DIRECT] = engine_for(pair, Options(LENGTH, mode=Mode.DIRECT), calibration)
    found[CACHE] = engine_for(pair, fixed, calibration)
    for row, variant in variants().items():
        options = Options() if row == OURS else Options(THRESHOLD, mode=Mode.ONLINE) if variant.head else fixed
        found[row] = engine_for(pair, options, calibration, learned[row])
    return found, learned


def measure_caches(
    task: str, texts: Sequence[str], engines: Mapping[str, Any], reports: Mapping[str, list[Report]],
    arguments: dict[str, Any], extras: PaperExtras,
) -> None:  # fmt: skip
    """How large the cache became, and what it is worth at a quarter and a half of that (LFU)."""
    full = engines[CACHE]
    entries = len(full.cache)
    size = {"n-grams": entries, "MB as JSON": round(len(json.dumps(full.cache.to_payload())) / 1e6, 3)}
    extras.caches.append({"task": task, "precision": full.pair.precision, **size})
    smaller: dict[str, Engine] = {}
    for part in PARTS:
        engine = engine_for(full.pair, full.options, full.calibration)
        assert engine.cache is not None
        engine.cache.capacity = max(1, entries // part)
        smaller[f"1/{part} of the cache, LFU"] = engine
    found = measure(smaller, task, texts, arguments, lambda: None)
    together = {"no cache": reports[DIRECT], **found, "whole cache": reports[CACHE]}
    extras.evictions += rows(task, together)


def extra_sheets(extras: PaperExtras) -> Iterator[Sheet]:
    """What was measured of our caches; then the paper's own figures, beside ours and never among them."""
    names = ("task", "precision", "n-grams", "MB as JSON")
    sizes = [[str(cache[name]) for name in names] for cache in extras.caches]
    yield Sheet("n-gram caches", names, sizes)
    columns = ("accept", "/verify")
    for (task, precision), lines in groupby(extras.evictions, lambda row: (row.task, row.precision)):
        cells = [[row.row, *(COLUMNS[name](row) for name in columns)] for row in lines]
        yield Sheet(f"eviction, {task}: {precision}", ("cache", *columns), cells)
    for title, methods in PAPER.items():
        yield Sheet(f"The paper: {title}", ("", *TASKS), [[name, *cells] for name, cells in methods.items()])
