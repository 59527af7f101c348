"""The measuring behind the bench: interleaved runs of several engines, summed up per task."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from omnidraft.adapters.head import calibration
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.report import Report
from omnidraft.runtime.untrusted import MIB, parse_json

RESAMPLES = 2000
MAX_PROMPTS_BYTES = 64 * MIB
FOREIGN = "foreign"  # what a report of another runtime has for `verification`


@dataclass(frozen=True)
class Row:
    """One line of the bench. Speeds and times are medians over prompts; rates are weighted by their counts.

    `speedup`: median over prompts of tokens per second against the first row on the same prompt, and
    `speedup_interval` its 95 % confidence. `last_gain`: (low, middle, high) of how much quicker the last row is than
    this one, as a mean ratio over prompts. `speeds`: tokens per second of each prompt.
    `gain`: (low, middle, high) of tokens per verify less those of the first drafting row, with 95 % confidence;
    `acceptance_gain`: the same of the acceptance rate.
    `calibration`: (expected calibration error, bias) of the expected acceptances, where the draft length used them.
    `with_learning`: tokens per second while learning goes on all the time, for rows that have learned.
    `same_text`: prompts whose tokens equal plain decoding's at W₀ rows; None where that is not promised.
    `peak_rss`: largest resident memory of the whole process so far, bytes. Times are seconds.
    """

    task: str
    row: str
    precision: str
    n: int
    tokens_per_second: float | None
    speedup: float | None
    acceptance_rate: float | None
    tokens_per_verify: float | None
    gain: tuple[float, float, float] | None
    ngram_use: float | None
    coverage: float | None
    time_to_first_token: float | None
    overhead_ms: float | None
    same_text: int | None
    peak_rss: int
    phases: dict[str, float]
    mean_draft_length: float | None = None
    lookup_use: float | None = None
    speedup_interval: tuple[float, float] | None = None
    last_gain: tuple[float, float, float] | None = None
    calibration: tuple[float, float] | None = None
    speeds: list[float | None] = field(default_factory=list)
    acceptance_gain: tuple[float, float, float] | None = None
    with_learning: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_prompts(path: Path, n: int | None = None) -> dict[str, list[str]]:
    """The first `n` prompts of each task of a JSONL file, or all. Raises OmniDraftError naming file and line."""
    try:
        with path.open("rb") as file:  # a pipe will do
            data = file.read(MAX_PROMPTS_BYTES + 1)
        if len(data) > MAX_PROMPTS_BYTES:
            raise ValueError(f"more than {MAX_PROMPTS_BYTES // MIB} MiB")
        lines = data.decode().split("\n")
    except (OSError, ValueError) as error:
        raise OmniDraftError(f"{path}: cannot be read ({error}); give a JSONL file of prompts") from None
    tasks: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            prompt, task = row["prompt"], str(row.get("task", "prompts"))
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError
            (prompt + task).encode()  # no half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OmniDraftError(f'{path}:{number}: not a JSON object with a text under "prompt"') from None
        texts = tasks.setdefault(task, [])
        if n is None or len(texts) < n:
            texts.append(prompt)
    if not tasks:
        raise OmniDraftError(f"{path}: has no prompts")
    return tasks


class Contender(Protocol):
    """Something that answers prompts: an engine, or another runtime beside it."""

    def encode(self, prompt: Any, max_new_tokens: int, raw: bool = False) -> Any:
        """Raises OmniDraftError for a prompt that does not fit."""
        ...

    def generate(self, prompt: Any, **arguments: Any) -> Report:
        """One answer; arguments as for `Engine.stream`."""
        ...

    def forget(self) -> None:
        """Have the next answer read all of its prompt."""
        ...


def measure(
    engines: Mapping[str, Contender],
    task: str,
    prompts: Sequence[str],
    arguments: dict[str, Any],
    advance: Callable[[], None],
) -> dict[str, list[Report]]:
    """Run every prompt through every engine, in an order drawn anew for each prompt: no row always follows another.

    `arguments` are those of `Engine.stream`. A first, short run of each engine is not counted.
    Raises OmniDraftError before anything is run if a prompt does not fit.
    """
    for i, prompt in enumerate(prompts, 1):
        try:
            next(iter(engines.values())).encode(prompt, arguments["max_new_tokens"], arguments["raw"])
        except OmniDraftError as error:
            raise OmniDraftError(f"prompt {i} of task {task!r}: {error}") from None
    for engine in engines.values():
        engine.generate(prompts[0], **{**arguments, "max_new_tokens": 4})
    reports: dict[str, list[Report]] = {name: [] for name in engines}
    order = list(engines)
    for i, prompt in enumerate(prompts):
        for name in random.Random(i).sample(order, len(order)):
            engines[name].forget()
            reports[name].append(engines[name].generate(prompt, **arguments))
            advance()
    return reports


def rows(task: str, reports: Mapping[str, list[Report]]) -> list[Row]:
    """A line for each engine's reports on the same prompts.

    The first engine is what speed-ups are against; the first exact one is what texts are against; the first of
    ours that drafts is what gains are against.
    """
    runs = list(reports.values())
    exact = next((run for run in runs if run[0].lossless == "exact"), None)
    first = next((run for run in runs if run[0].drafted and run[0].verification != FOREIGN), None)
    return [_row(task, name, run, runs, exact, first) for name, run in reports.items()]


def gain(
    mine: Sequence[Report], other: Sequence[Report], part: str = "emitted", whole: str = "passes"
) -> tuple[float, float, float] | None:
    """(low, middle, high): part / whole of one run less that of another on the same prompts, 95 % confidence.

    `part`, `whole`: counts of a report; as they are, tokens per verify. A paired bootstrap over prompts: they differ
    more than the runs do. None for fewer than two prompts.
    """
    if len(mine) < 2:
        return None
    counts = np.array([[(r.counts[part], r.counts[whole]) for r in run] for run in (mine, other)], float)
    drawn = np.random.default_rng(0).integers(0, len(mine), (RESAMPLES, len(mine)))
    sums = np.concatenate([counts.sum(1)[:, None], counts[:, drawn].sum(2)], 1)
    rates = sums[..., 0] / np.maximum(sums[..., 1], 1)
    difference = rates[0] - rates[1]
    low, high = np.quantile(difference[1:], (0.025, 0.975))
    return float(low), float(difference[0]), float(high)


def _row(
    task: str, name: str, mine: list[Report], runs: list[list[Report]], exact: list[Report] | None,
    first: list[Report] | None,
) -> Row:  # fmt: skip
    compared = first if first is not mine and mine[0].drafted else None
    faster = _ratios(mine, runs[0])
    promised = exact is not None and mine[0].lossless == "exact" and mine[0].verification == "coupled"
    return Row(
        task=task,
        row=name,
        precision=mine[0].precision,
        n=len(mine),
        tokens_per_second=_median(r.tokens_per_second for r in mine),
        speedup=_median(faster),
        speedup_interval=_interval(faster, np.median),
        last_gain=None if mine is runs[-1] else _with_middle(_ratios(runs[-1], mine)),
        speeds=[r.tokens_per_second for r in mine],
        mean_draft_length=_weighted(mine, "proposed", "rounds") if mine[0].drafted else None,
        lookup_use=_weighted(mine, "lookups", "proposed"),
        calibration=_calibration(mine),
        acceptance_rate=_weighted(mine, "accepted", "proposed"),
        tokens_per_verify=_weighted(mine, "emitted", "passes") if mine[0].drafted else None,
        gain=None if compared is None else gain(mine, compared),
        ngram_use=_weighted(mine, "merges", "proposed"),
        coverage=_weighted(mine, "translated", "drawn"),
        time_to_first_token=_median(r.time_to_first_token for r in mine),
        overhead_ms=_median(r.overhead_ms for r in mine),
        same_text=sum(r.tokens == e.tokens for r, e in zip(mine, exact, strict=True)) if promised and exact else None,
        peak_rss=_peak_rss(),
        acceptance_gain=None if compared is None else gain(mine, compared, "accepted", "proposed"),
        phases={phase: sum(r.phases[phase] for r in mine) for phase in mine[0].phases},
    )


def _ratios(mine: Sequence[Report], other: Sequence[Report]) -> list[float]:
    pairs = [(r.tokens_per_second, o.tokens_per_second) for r, o in zip(mine, other, strict=True)]
    return [r / o for r, o in pairs if r is not None and o is not None]


def _interval(figures: Sequence[float], middle: Callable[..., Any]) -> tuple[float, float] | None:
    """95 % confidence of `middle` over prompts, by bootstrap; None for fewer than two."""
    if len(figures) < 2:
        return None
    drawn = np.random.default_rng(0).integers(0, len(figures), (RESAMPLES, len(figures)))
    low, high = np.quantile(middle(np.array(figures)[drawn], axis=1), (0.025, 0.975))
    return float(low), float(high)


def _with_middle(figures: Sequence[float]) -> tuple[float, float, float] | None:
    found = _interval(figures, np.mean)
    return None if found is None else (found[0], float(np.mean(figures)), found[1])


def _calibration(reports: Sequence[Report]) -> tuple[float, float] | None:
    pairs = [pair for report in reports for pair in report.predictions]
    if not pairs:
        return None
    predicted, observed = np.array(pairs, float).T
    found = calibration(predicted, observed)
    return found.error, found.bias


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return median(known) if known else None


def _weighted(reports: list[Report], part: str, whole: str) -> float | None:
    total = sum(r.counts[whole] for r in reports)
    return sum(r.counts[part] for r in reports) / total if total else None


def _peak_rss() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
