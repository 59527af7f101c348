"""omnidraft bench: how much drafting gains, row by row, against plain decoding of the same graph."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from omnidraft.tools.comparison import Findings, Order
    from omnidraft.tools.tables import Sheet

DRAFT, MAP = "1,2,4,threshold,cost", "full"
LEGEND = (
    "speed-up: against plain decoding with 1-row passes, median over prompts. accept: acceptance rate; "
    "/verify: tokens per verify; k: proposals a round; last: how much quicker the last row is, 95 % interval; "
    "equal: texts equal to plain decoding; learn: tokens/s while learning goes on all the time. "
    "With --map, gain: tokens per verify more than the first map, 95 % interval. "
    "With --paper, accept +: acceptance rate more than SpD_DM, 95 % interval; 95 %: interval of the speed-up."
)


def bench(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task and id if you like.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of each task.")] = 8,
    target: o.Target = None,
    precision: Annotated[str | None, typer.Option(help="One or more, by commas. [default: the target's first]")] = None,
    draft: Annotated[str, typer.Option(help="Rows, by commas: lengths, threshold[:G], cost, cost-no-look-up.")] = DRAFT,
    maps: Annotated[str, typer.Option("--map", help="Each of them with: direct, online, static, full.")] = MAP,
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
    profile: o.Profile = "auto",
    learn_from: Annotated[
        Path | None, typer.Option(help="JSONL of other prompts to learn from first; adds a row for each loss and rank.")
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="The rows of the paper's tables; each task learns from its own in --learn-from."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="Rows for other runtimes, by commas: onnxruntime (there anyway), genai, transformers, "
            "transformers-assisted, llama.cpp. One that is not installed is skipped, with the reason."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for figures, tables and pictures; results are never overwritten.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare plain decoding and drafting, interleaved, on the same prompts: draft lengths, and vocabulary maps.

    Every row starts each task without a cache and keeps nothing. Figures are medians over prompts of
    decoding alone; the time to the first token is apart.
    """
    from rich.console import Console

    from omnidraft.runtime import compiled
    from omnidraft.runtime.bundle import MANIFEST, open_bundle
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.tools.comparison import Order, compare
    from omnidraft.tools.contenders import choose
    from omnidraft.tools.measure import read_prompts
    from omnidraft.tools.paper_tables import check_lessons
    from omnidraft.tools.peers.against import read_against
    from omnidraft.tools.results import ResultFolder, document, write_document

    choices = choose(draft, maps, lossless, verification)
    peers = read_against(against) if against else []
    if peers and stop:
        raise OmniDraftError("--against: not every runtime can stop before a text; leave --stop out")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    wishes = read_wishes(ep, strict_ep, profile)
    tasks, lessons = read_prompts(prompts, n), {} if learn_from is None else read_prompts(learn_from)
    if paper:
        if (draft, maps, lossless, verification) != (DRAFT, MAP, "exact", "coupled"):
            raise OmniDraftError("--paper has rows of its own; leave --draft, --map, --lossless and --verification out")
        check_lessons(tasks, lessons)
    opened = open_bundle(bundle)
    name, info = opened.target(target)
    wanted = [part.strip() for part in precision.split(",")] if precision else [None]
    profiles = compiled.profiles(info.graphs, wishes.target)
    precisions = [opened.graph(name, part, profiles).precision for part in wanted]
    arguments = {"sampling": sampling, "max_new_tokens": max_new_tokens, "stop": stop or (), "raw": raw}
    order = Order(bundle, name, precisions, threads, wishes, tasks, lessons, choices, paper, peers, arguments)
    how: dict[str, Any] = {"target": name, "draft": draft, "map": maps, "lossless": lossless, "raw": raw}
    how |= {"verification": verification, "n": n, "paper": paper, "against": peers, "sampling": vars(sampling)}
    how |= {"max_new_tokens": max_new_tokens, "stop": stop or []}
    files = {"bundle": bundle / MANIFEST, "prompts": prompts, "learn_from": learn_from}
    # Hours of work should not end at a place that cannot be written, or a picture that cannot be drawn.
    if out is not None and find_spec("matplotlib") is None:
        raise OmniDraftError("--out draws pictures with matplotlib; pip install -c constraints.txt matplotlib")
    if json_file is not None:
        write_document(json_file, {})
    with ResultFolder(out) if out is not None else nullcontext() as folder:
        console = Console()
        findings = compare(order, console)
        _show(order, findings, console)
        found = document(how, files, findings)
        if json_file is not None:
            write_document(json_file, found)
        if folder is not None:
            _keep(folder, order, findings, found)


def _sheets(order: Order, findings: Findings) -> list[Sheet]:
    from omnidraft.tools.paper_tables import extra_sheets
    from omnidraft.tools.tables import LENGTHS, MAPS, PAPER, sheets

    several = len({choice.mode for choice in order.choices}) > 1
    columns = PAPER if order.paper else MAPS if several else LENGTHS
    found = list(sheets(findings.rows, order.target, order.arguments["sampling"], columns, findings.absent))
    return [*found, *extra_sheets(findings.extras)] if order.paper else found


def _show(order: Order, findings: Findings, console: Console) -> None:
    from omnidraft.tools.comparison import ALL

    for sheet in _sheets(order, findings):
        console.print(sheet.terminal())
    for row in findings.rows:
        if row.task == ALL and row.calibration is not None:
            error, bias = row.calibration
            console.print(f"{row.row}, {row.precision}: expected acceptance has ECE {error:.3f}, bias {bias:+.3f}")
    console.print(LEGEND)
    for row in findings.rows:
        if row.task != ALL and row.same_text is not None and row.same_text < row.n:
            o.warn(f"{row.task}, {row.row}, {row.precision}: text equal to plain for {row.same_text} of {row.n} only")


def _keep(folder: Path, order: Order, findings: Findings, found: dict[str, Any]) -> None:
    from omnidraft.tools.plots import draw_bench, draw_learning

    (folder / "result.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = "\n\n".join([*(sheet.markdown() for sheet in _sheets(order, findings)), LEGEND]) + "\n"
    (folder / "table.md").write_text(table, encoding="utf-8")
    draw_bench(findings.rows, folder)
    if findings.losses:
        draw_learning(findings.losses, folder / "learning.png")
