"""omnidraft bench: how much drafting gains, row by row, against plain decoding of the same graph."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.pair import Pair
    from omnidraft.tools.learned import Learned

LEGEND = (
    "speed-up: against plain decoding with 1-row passes, median over prompts. accept: acceptance rate; "
    "/verify: tokens per verify; gain: how many more than the direct map, 95 % interval over prompts; "
    "n-gram: n-gram use; learn: tokens/s while learning goes on all the time; equal: texts equal to plain decoding. "
    "static + online is what omnidraft run uses; below 1.00, drafting costs more than it brings."
)


def bench(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task and id if you like.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of each task.")] = 8,
    target: o.Target = None,
    precision: Annotated[str | None, typer.Option(help="One or more, by commas. [default: the target's first]")] = None,
    draft: o.DraftLength = "auto",
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
    learn_from: Annotated[
        Path | None, typer.Option(help="JSONL of other prompts to learn from first; adds a row for each loss and rank.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare plain decoding, the paper's translation and ours, interleaved, on the same prompts.

    Every row starts each task without a cache and keeps nothing. Figures are medians over prompts of
    decoding alone; the time to the first token is apart.
    """
    from rich.console import Console
    from rich.progress import Progress

    from omnidraft.runtime.bundle import open_bundle
    from omnidraft.runtime.calibration import least_rows
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.pair import load_pair
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.runtime.state import State
    from omnidraft.tools.learned import with_learning
    from omnidraft.tools.measure import measure, read_prompts
    from omnidraft.tools.tables import tables

    options = Options(draft, lossless, verification)
    if options.draft_length == 0:
        raise OmniDraftError("bench compares drafting with plain decoding; --draft off leaves nothing to compare")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    tasks = read_prompts(prompts, n)
    opened = open_bundle(bundle)
    name, _ = opened.target(target)
    graphs = (
        [opened.graph(name, part.strip()) for part in precision.split(",")] if precision else [opened.graph(name, None)]
    )
    if json_file is not None:
        _write(json_file, {})  # minutes of work should not end at a folder that is not there

    lessons = [] if learn_from is None else [text for texts in read_prompts(learn_from).values() for text in texts]
    console, rows, described = Console(), [], []
    arguments = {"sampling": sampling, "max_new_tokens": max_new_tokens, "stop": stop or (), "raw": raw}
    for graph in graphs:
        pair = load_pair(bundle, name, graph.precision, threads)
        w0 = least_rows(pair, State(None, o.warn))
        if w0 is None:
            o.warn("no width gives equal rows on this device: texts may differ between rows")
        described.append({"precision": graph.precision, "graph": pair.graph_sha256, "threads": pair.threads, "w0": w0})
        with Progress(console=console, transient=True) as progress:
            learned = _learn(pair, options, w0, lessons, arguments, progress) if lessons else {}
            for task, texts in tasks.items():
                engines = make_rows(pair, options, w0)
                engines |= {row: _adapted(pair, options, w0, adapter) for row, adapter in learned.items()}
                bar = progress.add_task(task, total=len(texts) * len(engines))
                measured = measure(engines, task, texts, arguments, lambda: progress.advance(bar))  # noqa: B023
                rows += [with_learning(row, learned.get(row.row)) for row in measured]
    for table in tables(rows, name, sampling):
        console.print(table)
    console.print(LEGEND)
    for row in rows:
        if row.same_text is not None and row.same_text < row.n:
            o.warn(f"{row.task}, {row.row}, {row.precision}: text equal to plain for {row.same_text} of {row.n} only")
    if json_file is not None:
        how = {"target": name, "draft": draft, "lossless": lossless, "verification": verification, "raw": raw}
        how |= {"max_new_tokens": max_new_tokens, "stop": stop or [], "sampling": vars(sampling), "graphs": described}
        _write(json_file, {"machine": _machine(), "options": how, "rows": [row.as_dict() for row in rows]})


def make_rows(pair: Pair, options: Options, w0: int | None) -> dict[str, Engine]:
    """One engine per row of the bench, without a cache, all on the same loaded pair."""
    from dataclasses import replace

    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.state import State
    from omnidraft.runtime.translation import Mode

    rows = {
        "plain, 1 row": Options("off", "near"),
        f"plain, {w0 or 1} rows": Options("off"),
        "direct map": replace(options, mode=Mode.DIRECT),
        "+ online cache": replace(options, mode=Mode.ONLINE),
        "+ static map": replace(options, mode=Mode.STATIC),
        "static + online": replace(options, mode=Mode.FULL),
    }
    return {row: Engine(pair, chosen, State(None, o.warn), w0) for row, chosen in rows.items()}


def _learn(
    pair: Pair, options: Options, w0: int | None, prompts: list[str], arguments: dict[str, Any], progress: Progress
) -> dict[str, Learned]:
    from omnidraft.tools.learned import learn, variants

    bar = progress.add_task("learning", total=len(prompts) + len(variants()))
    return learn(_adapted(pair, options, w0, None), prompts, arguments, lambda: progress.advance(bar))


def _adapted(pair: Pair, options: Options, w0: int | None, learned: Learned | None) -> Engine:
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.state import State

    engine = Engine(pair, options, State(None, o.warn), w0)
    if learned is not None:
        engine.use_adapter(learned.parameters)
    return engine


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
