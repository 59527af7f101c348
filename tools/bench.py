"""omnidraft bench: how much drafting gains, row by row, against plain decoding of the same graph."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.runtime.calibration import Calibration
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.pair import Pair
    from omnidraft.runtime.report import Report
    from omnidraft.tools.learned import Learned
    from omnidraft.tools.measure import Contender, Row

ALL = "all tasks"
LEGEND = (
    "speed-up: against plain decoding with 1-row passes, median over prompts. accept: acceptance rate; "
    "/verify: tokens per verify; k: proposals a round; gain (with --map): tokens per verify more than the first map, "
    "95 % interval; last: how much quicker the last row is, 95 % interval; "
    "learn: tokens/s while learning goes on all the time; equal: texts equal to plain decoding."
)


def bench(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task and id if you like.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of each task.")] = 8,
    target: o.Target = None,
    precision: Annotated[str | None, typer.Option(help="One or more, by commas. [default: the target's first]")] = None,
    draft: Annotated[
        str, typer.Option(help="Rows, by commas: lengths, threshold[:G], cost, cost-no-look-up.")
    ] = "1,2,4,threshold,cost",
    maps: Annotated[str, typer.Option("--map", help="Each of them with: direct, online, static, full.")] = "full",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens to emit.")] = 96,
    stop: o.Stop = None,
    raw: o.Raw = False,
    lossless: o.Lossless = "exact",
    verification: o.Verification = "coupled",
    threads: o.Threads = 0,
    ep: o.Ep = "auto",
    strict_ep: o.StrictEp = False,
    learn_from: Annotated[
        Path | None, typer.Option(help="JSONL of other prompts to learn from first; adds a row for each loss and rank.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="genai: a row for onnxruntime-genai's own plain decoding.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare plain decoding and drafting, interleaved, on the same prompts: draft lengths, and vocabulary maps.

    Every row starts each task without a cache and keeps nothing. Figures are medians over prompts of
    decoding alone; the time to the first token is apart.
    """
    from rich.console import Console
    from rich.progress import Progress

    from omnidraft.runtime.bundle import open_bundle
    from omnidraft.runtime.calibration import calibrate
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.pair import load_pair
    from omnidraft.runtime.placement import read_wishes, warnings
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.runtime.state import State
    from omnidraft.tools.contenders import choose, make_rows
    from omnidraft.tools.genai import NAME, Genai
    from omnidraft.tools.learned import with_learning
    from omnidraft.tools.measure import measure, read_prompts, rows
    from omnidraft.tools.tables import LENGTHS, MAPS, tables

    choices = choose(draft, maps, lossless, verification)
    if against not in (None, "genai"):
        raise OmniDraftError(f"--against {against}: only genai so far")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    wishes = read_wishes(ep, strict_ep)
    tasks = read_prompts(prompts, n)
    opened = open_bundle(bundle)
    name, _ = opened.target(target)
    graphs = (
        [opened.graph(name, part.strip()) for part in precision.split(",")] if precision else [opened.graph(name, None)]
    )
    if json_file is not None:
        _write(json_file, {})  # minutes of work should not end at a folder that is not there

    lessons = [] if learn_from is None else [text for texts in read_prompts(learn_from).values() for text in texts]
    console = Console()
    lines: list[Row] = []
    described: list[dict[str, Any]] = []
    arguments = {"sampling": sampling, "max_new_tokens": max_new_tokens, "stop": stop or (), "raw": raw}
    for graph in graphs:
        pair = load_pair(bundle, name, graph.precision, threads, wishes=wishes)
        for line in warnings(pair.placement):
            o.warn(line)
        calibration = calibrate(pair, State(None, o.warn), tell=o.tell)
        if calibration.w0 is None:
            o.warn("no width gives equal rows on this device: texts may differ between rows")
        described.append(_described(pair, calibration))
        with Progress(console=console, transient=True) as progress:
            learned = _learn(pair, choices[0], calibration, lessons, arguments, progress) if lessons else {}
            rival = Genai(_adapted(pair, choices[0], calibration, None)) if against else None
            together: dict[str, list[Report]] = {}
            for task, texts in tasks.items():
                engines: dict[str, Contender] = dict(make_rows(pair, choices, calibration))
                if rival is not None:
                    plain = next(iter(engines))
                    engines = {plain: engines.pop(plain), NAME: rival, **engines}
                engines |= {row: _adapted(pair, choices[0], calibration, adapter) for row, adapter in learned.items()}
                bar = progress.add_task(task, total=len(texts) * len(engines))
                reports = measure(engines, task, texts, arguments, lambda: progress.advance(bar))  # noqa: B023
                lines += [with_learning(row, learned.get(row.row)) for row in rows(task, reports)]
                for label, run in reports.items():
                    together.setdefault(label, []).extend(run)
            lines += rows(ALL, together) if len(tasks) > 1 else []
    for table in tables(lines, name, sampling, MAPS if len({choice.mode for choice in choices}) > 1 else LENGTHS):
        console.print(table)
    for row in lines:
        if row.task == ALL and row.calibration is not None:
            error, bias = row.calibration
            console.print(f"{row.row}, {row.precision}: expected acceptance has ECE {error:.3f}, bias {bias:+.3f}")
    console.print(LEGEND)
    for row in lines:
        if row.task != ALL and row.same_text is not None and row.same_text < row.n:
            o.warn(f"{row.task}, {row.row}, {row.precision}: text equal to plain for {row.same_text} of {row.n} only")
    if json_file is not None:
        how: dict[str, Any] = {"target": name, "draft": draft, "map": maps, "lossless": lossless, "raw": raw}
        how |= {"verification": verification}
        how |= {"max_new_tokens": max_new_tokens, "stop": stop or [], "sampling": vars(sampling), "graphs": described}
        _write(json_file, {"machine": _machine(), "options": how, "rows": [row.as_dict() for row in lines]})


def _learn(
    pair: Pair,
    options: Options,
    calibration: Calibration,
    prompts: list[str],
    arguments: dict[str, Any],
    progress: Progress,
) -> dict[str, Learned]:
    from omnidraft.tools.learned import learn, variants

    bar = progress.add_task("learning", total=len(prompts) + len(variants()))
    return learn(_adapted(pair, options, calibration, None), prompts, arguments, lambda: progress.advance(bar))


def _adapted(pair: Pair, options: Options, calibration: Calibration, learned: Learned | None) -> Engine:
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.state import State

    engine = Engine(pair, options, State(None, o.warn), calibration)
    if learned is not None:
        engine.use_adapter(learned.parameters)
    return engine


def _described(pair: Pair, calibration: Calibration) -> dict[str, Any]:
    found: dict[str, Any] = {"precision": pair.precision, "graph": pair.graph_sha256, "threads": pair.threads}
    for name, times in (("target", calibration.target), ("drafter", calibration.drafter)):
        found[f"{name}_passes"] = None if times is None else times.as_dict()
    placement = {model: asdict(placed) for model, placed in pair.placement.items()}
    return {**found, "w0": calibration.w0, "placement": placement}


def _machine() -> dict[str, str]:
    import onnxruntime

    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    from omnidraft.runtime.errors import OmniDraftError

    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OmniDraftError(f"{path}: cannot be written ({error.strerror}); give --json another file") from None
