"""One bench: every graph, every task, all rows interleaved; what was found, and what it was found with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.placed import warnings
from omnidraft.runtime.placement import Wishes
from omnidraft.runtime.report import Report
from omnidraft.runtime.state import State
from omnidraft.tools import options as o
from omnidraft.tools.contenders import engine_for, make_rows
from omnidraft.tools.learned import Learned, learn, variants, with_learning
from omnidraft.tools.measure import Contender, Row, measure, rows
from omnidraft.tools.paper_tables import PaperExtras, measure_caches, paper_rows
from omnidraft.tools.paper_tables import variants as paper_variants
from omnidraft.tools.peers.against import Opened, open_peers
from omnidraft.tools.results import answers

ALL = "all tasks"
Lineup = Callable[[str], tuple[dict[str, Engine], dict[str, Learned]]]
"""Engines of a task by row, plain decoding first, and what was learned for some of them."""


@dataclass(frozen=True)
class Order:
    """What to compare. `tasks`: prompts by task; `lessons`: other prompts by task, to learn from first.

    `choices`: what each drafting row decodes with; `paper`: the paper's rows in their place; `peers`: names of other
    runtimes; `arguments`: those of `Engine.stream`, the same for every row.
    """

    bundle: Path
    target: str
    precisions: Sequence[str]
    threads: int
    wishes: Wishes
    tasks: Mapping[str, Sequence[str]]
    lessons: Mapping[str, Sequence[str]]
    choices: Sequence[Options]
    paper: bool
    peers: Sequence[str]
    arguments: dict[str, Any]


@dataclass
class Findings:
    """`rows` of the tables; `answers`: the figures of each answer; `graphs`: what each graph is, and how it runs here.

    `peers`: what other runtimes tell of themselves, by row; `absent`: by precision, those that took no part and why;
    `losses`: of each step of learning, by lessons and row; `extras`: what --paper finds beside its rows.
    """

    rows: list[Row] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    extras: PaperExtras = field(default_factory=PaperExtras)


def compare(order: Order, console: Console) -> Findings:
    """Run it. Raises OmniDraftError for what is missing, and if a peer fails on the way."""
    findings = Findings()
    for precision in order.precisions:
        pair = load_pair(order.bundle, order.target, precision, order.threads, wishes=order.wishes)
        for line in warnings(pair.placement):
            o.warn(line)
        calibration = calibrate(pair, State(None, o.warn), tell=o.tell)
        if calibration.least_rows is None:
            o.warn("no width gives equal rows on this device: texts may differ between rows")
        findings.graphs.append(_described(pair, calibration))
        with Progress(console=console, transient=True) as progress, closing(_peers(order, pair, calibration)) as peers:
            findings.absent[pair.precision] = peers.absent
            findings.peers |= {row: peer.facts for row, peer in peers.peers.items()}
            _compare(order, pair, calibration, peers, findings, progress)
    return findings


def _compare(
    order: Order, pair: Pair, calibration: Calibration, peers: Opened, findings: Findings, progress: Progress
) -> None:
    lineup = (_paper if order.paper else _rows)(order, pair, calibration, progress)
    together: dict[str, list[Report]] = {}
    for task, texts in order.tasks.items():
        ours, learned = lineup(task)
        plain = {row: engine for row, engine in ours.items() if not engine.options.drafts}
        contenders: dict[str, Contender] = {**plain, **peers.peers, **ours}
        bar = progress.add_task(task, total=len(texts) * len(contenders))
        reports = measure(contenders, task, texts, order.arguments, lambda: progress.advance(bar))  # noqa: B023
        findings.rows += [with_learning(row, learned.get(row.row)) for row in rows(task, reports)]
        findings.answers += answers(task, reports)
        if learned:
            lessons = f"{task if order.paper else 'all lessons'}, {pair.precision}"
            findings.losses[lessons] = {row: found.losses for row, found in learned.items()}
        if order.paper:
            measure_caches(task, texts, ours, reports, order.arguments, findings.extras)
        for label, run in reports.items():
            together.setdefault(label, []).extend(run)
    findings.rows += rows(ALL, together) if len(order.tasks) > 1 else []


def _rows(order: Order, pair: Pair, calibration: Calibration, progress: Progress) -> Lineup:
    """The rows that --draft and --map ask for, and those that learned all the lessons."""
    learned: dict[str, Learned] = {}
    if order.lessons:
        lessons = [text for texts in order.lessons.values() for text in texts]
        bar = progress.add_task("learning", total=len(lessons) + len(variants()))
        engine = engine_for(pair, order.choices[0], calibration)
        learned = learn(engine, lessons, variants(), order.arguments, lambda: progress.advance(bar))

    def rows_of(task: str) -> tuple[dict[str, Engine], dict[str, Learned]]:
        adapted = {row: engine_for(pair, order.choices[0], calibration, found) for row, found in learned.items()}
        return {**make_rows(pair, order.choices, calibration), **adapted}, learned

    return rows_of


def _paper(order: Order, pair: Pair, calibration: Calibration, progress: Progress) -> Lineup:
    """The paper's rows, each task with what it learned from lessons of its own."""

    def rows_of(task: str) -> tuple[dict[str, Engine], dict[str, Learned]]:
        lessons = order.lessons[task]
        bar = progress.add_task(f"learning {task}", total=len(lessons) + len(paper_variants()))
        return paper_rows(pair, calibration, lessons, order.arguments, lambda: progress.advance(bar))

    return rows_of


def _peers(order: Order, pair: Pair, calibration: Calibration) -> Opened:
    engine = engine_for(pair, Options("off"), calibration)
    most, raw = order.arguments["max_new_tokens"], order.arguments["raw"]
    prompts = [engine.encode(text, most, raw)[0] for texts in order.tasks.values() for text in texts]
    return open_peers(order.peers, engine, order.arguments["sampling"], prompts, most)


def _described(pair: Pair, calibration: Calibration) -> dict[str, Any]:
    digests = {model: pair.bundle.digest(graph) for model, graph in pair.graphs.items()}
    found: dict[str, Any] = {"precision": pair.precision, "graph": digests["target"], "threads": pair.threads}
    found["drafter_graph"] = digests.get("drafter")
    for name, times in (("target", calibration.target), ("drafter", calibration.drafter)):
        found[f"{name}_passes"] = None if times is None else times.as_dict()
    placement = {model: asdict(placed) for model, placed in pair.placement.items()}
    return {**found, "w0": calibration.w0, "width": calibration.width, "placement": placement}
