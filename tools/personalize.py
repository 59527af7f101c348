"""omnidraft personalize: go through prompts, answer them, and learn between the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.adapters.learner import Learner, Round
    from omnidraft.runtime.engine import Engine
    from omnidraft.tools.log import Log
    from omnidraft.tools.measure import Row
    from omnidraft.tools.session import Session

HELD_OUT = 5  # one prompt of so many is only measured
ENOUGH = 900  # proposals, to say how far expected acceptances are off


def personalize(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task if you like; learned in this order.")],
    target: o.Target = None,
    precision: o.Precision = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Stop after so many minutes.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop after so many rounds of learning.")] = None,
    test: Annotated[int, typer.Option(min=0, help="Held-out prompts of each task to measure with; 0: none.")] = 8,
    trainer: o.Trainer = "auto",
    loss: Annotated[str, typer.Option(help="projected, or paper: OmniDraft's own.")] = "projected",
    weight: Annotated[
        str, typer.Option("--lambda", help="Weight of the likelihood of what was said, or dynamic.")
    ] = "0.2",
    rank: Annotated[
        int | None, typer.Option(min=1, max=256, help="LoRA rank. [default: 32, or that of what was learned]")
    ] = None,
    rate: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 4e-3,
    batch: Annotated[int, typer.Option(min=1, help="Responses of a training step.")] = 8,
    interval: Annotated[int, typer.Option(min=1, help="Responses between two rounds of learning.")] = 8,
    budget: Annotated[float, typer.Option(help="Seconds of learning for each second of decoding.")] = 1.0,
    cache: Annotated[str, typer.Option(help="on, or off: without the n-gram cache, to see what it adds.")] = "on",
    draft: o.Draft = "4",
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    threads: o.Threads = 0,
    state: o.StateFolder = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the session to this .png or .svg file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Answer prompts and learn from the answers; go on where the last session with this file stopped.

    One prompt in five is never learned from: with these, the drafter as shipped and the learned one are compared at
    the end.
    """
    from omnidraft.adapters.learner import Learner
    from omnidraft.adapters.settings import Settings
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.runtime.state import State, default_state_folder
    from omnidraft.runtime.translation import Mode
    from omnidraft.tools.measure import read_prompts

    check_outputs(plot, json_file)
    sampling = Sampling(temperature, seed=seed)
    settings = Settings(loss, parse_weight(weight), rank, rate, batch, interval, budget, trainer)
    if cache not in ("on", "off"):
        raise OmniDraftError(f"--cache {cache}: choose on or off")
    options = Options(draft, mode=Mode.FULL if cache == "on" else Mode.STATIC)
    if not options.drafts:
        raise OmniDraftError("--draft off leaves nothing to learn for; give --draft cost or a length")
    tasks = read_prompts(prompts)
    kept = State(state or default_state_folder(), o.warn)
    engine = Engine.open(bundle, target, precision, options, kept, threads, o.warn, o.tell)
    arguments: dict[str, Any] = {"sampling": sampling, "max_new_tokens": max_new_tokens}
    learning = [(task, text) for task, texts in tasks.items() for i, text in enumerate(texts) if not _held_out(i)]
    with closing(Learner(engine, kept, settings, o.warn)) as learner:
        outcomes: list[tuple[float, bool]] = []
        session = _learn(learner, learning, prompts, arguments, minutes, rounds, outcomes)
        expectations = _expectations(outcomes)
        held = {task: [text for i, text in enumerate(texts) if _held_out(i)] for task, texts in tasks.items()}
        held = {task: _fitting(engine, task, texts, max_new_tokens)[:test] for task, texts in held.items()}
        rows = _compare(learner, held, {**arguments, "stop": (), "raw": False}) if test else []
    name = f"{engine.pair.name} {engine.pair.precision}"
    if plot is not None:
        from omnidraft.tools.draw import draw_sessions

        draw_sessions({name: [session]}, f"{prompts.name} on {name}", plot)
        print(f"{plot}: the session as a picture")
    if json_file is not None:
        described: dict[str, Any] = {"session": vars(session), "settings": vars(settings)}
        described |= {"rows": [row.as_dict() for row in rows], "expectations": expectations}
        json_file.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def parse_weight(text: str) -> float | None:
    """λ as an option has it: a number, or None for "dynamic". Raises OmniDraftError."""
    from omnidraft.runtime.errors import OmniDraftError

    if text == "dynamic":
        return None
    try:
        return float(text)
    except ValueError:
        raise OmniDraftError(f"--lambda {text}: give a number, or dynamic") from None


def _held_out(index: int) -> bool:
    return index % HELD_OUT == HELD_OUT - 1


def _fitting(engine: Engine, task: str, texts: Sequence[str], max_new_tokens: int) -> list[str]:
    """The held-out prompts that fit the target's context; one line for each that does not."""
    from omnidraft.runtime.errors import OmniDraftError

    found = []
    for i, text in enumerate(texts, 1):
        try:
            engine.encode(text, max_new_tokens)
            found.append(text)
        except OmniDraftError as error:
            o.warn(f"held-out prompt {i} of {task} left out: {error}")
    return found


def _learn(
    learner: Learner,
    learning: Sequence[tuple[str, str]],
    prompts: Path,
    arguments: dict[str, Any],
    minutes: float | None,
    rounds: int | None,
    outcomes: list[tuple[float, bool]],
) -> Session:
    from omnidraft.runtime.bundle import sha256
    from omnidraft.tools.log import Bar
    from omnidraft.tools.session import SessionFile

    file = SessionFile(learner.state, learner.folder, learner.key, sha256(prompts))
    session = file.load()
    if session.done >= len(learning):
        o.warn(f"{prompts}: its {session.done} prompts were all learned from; beginning anew with the first")
        session.done = 0
    elif session.done:
        o.warn(f"{prompts}: going on behind the {session.done} prompts that were learned from already")
    end = None if minutes is None else monotonic() + 60 * minutes
    learned = 0
    with Bar() as log:
        log.stage("prompts", len(learning))
        log.advance(session.done, "prompts")
        try:
            for task, text in learning[session.done :]:
                done = _answer(learner, session, task, text, arguments, log, outcomes)
                file.save(session)
                learned += done is not None
                if (end is not None and monotonic() > end) or (rounds is not None and learned >= rounds):
                    break
        except KeyboardInterrupt:
            log.note(f"stopped behind {session.done} prompts; the same command goes on there")
            raise
    return session


def _answer(
    learner: Learner, session: Session, task: str, text: str, arguments: dict[str, Any], log: Log,
    outcomes: list[tuple[float, bool]],
) -> Round | None:  # fmt: skip
    """One more prompt, and what was learned after it; one that does not fit is left out with a line."""
    from omnidraft.runtime.errors import OmniDraftError

    try:
        report = learner.engine.generate(text, **arguments)
    except OmniDraftError as error:
        log.note(f"prompt {session.done + 1} left out: {error}")
        session.done += 1
        return None
    outcomes += report.predictions
    done = learner.after_response()
    session.add(task, report, done)
    if done is not None:
        log.note(_told(session, done, learner))
    log.advance(1, _live(session, learner))
    return done


def _live(session: Session, learner: Learner) -> str:
    recent = session.responses[-12:]
    seconds, tokens = (sum(row[i] for row in recent) for i in (3, 4))
    loss = f", loss {session.rounds[-1][1]:.2f}" if session.rounds else ""
    rate = session.acceptance(12)
    shown = "-" if rate is None else f"{rate:.2f}"
    return f"acceptance {shown}, {tokens / seconds:.0f} tokens/s{loss}, adapter {learner.version}"


def _told(session: Session, done: Round, learner: Learner) -> str:
    first = f" with {learner.trainer_reason}" if len(session.rounds) == 1 else ""
    line = f"round {len(session.rounds)}{first}: loss {done.loss:.3f}, {done.seconds:.1f} s"
    if done.kept is not None:
        verdict = f"kept as version {learner.version}" if done.kept else "rolled back"
        line += f"; agreement on unseen text {done.before:.3f} -> {done.after:.3f}, {verdict}"
    return f"{line}; {done.note}" if done.note else line


def _expectations(outcomes: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """How far expected acceptances were from what happened, in thirds of this sitting: curves for `reliability.py`."""
    import numpy as np

    from omnidraft.adapters.head import calibration

    found: dict[str, Any] = {}
    if len(outcomes) < ENOUGH:
        return found
    for name, part in zip(("first third", "second third", "last third"), np.array_split(outcomes, 3), strict=True):
        curve = calibration(part[:, 0].astype(float), part[:, 1].astype(float))
        print(f"expected acceptance, {name}: ECE {curve.error:.3f}, bias {curve.bias:+.3f}")
        found[name] = asdict(curve)
    return found


def _compare(learner: Learner, held: dict[str, list[str]], arguments: dict[str, Any]) -> list[Row]:
    """Plain decoding, the drafter as shipped and the learned one on held-out prompts, interleaved."""
    from rich.console import Console
    from rich.progress import Progress

    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.state import State
    from omnidraft.tools.measure import measure
    from omnidraft.tools.measure import rows as summed_up
    from omnidraft.tools.tables import MAPS, tables

    pair, options = learner.engine.pair, learner.engine.options
    nowhere = State(None, o.warn)
    engines = {
        "plain, 1 row": Engine(pair, Options("off", "near"), nowhere, learner.engine.calibration),
        "as shipped": Engine(pair, options, nowhere, learner.engine.calibration),
        "learned": Engine(pair, options, nowhere, learner.engine.calibration),
    }
    engines["learned"].use_adapter(learner.parameters, learner.head)
    rows: list[Row] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        count = bar.add_task("comparing on held-out prompts", total=sum(map(len, held.values())) * len(engines))
        for task, texts in held.items():
            if texts:
                rows += summed_up(task, measure(engines, task, texts, arguments, lambda: bar.advance(count)))
    for table in tables(rows, learner.engine.pair.name, arguments["sampling"], MAPS):
        Console().print(table)
    for row in rows:
        if row.row == "learned" and row.acceptance_gain is not None and row.acceptance_rate is not None:
            low, middle, high = row.acceptance_gain
            print(
                f"{row.task}: acceptance rate {row.acceptance_rate - middle:.3f} -> {row.acceptance_rate:.3f}, "
                f"{middle:+.3f} ({low:+.3f} to {high:+.3f}, 95 %) on {row.n} prompts it did not learn from"
            )
    return rows


def check_outputs(plot: Path | None, json_file: Path | None) -> None:
    """Minutes of work should not end at a file that cannot be written."""
    from importlib.util import find_spec

    from omnidraft.runtime.errors import OmniDraftError

    for option, path in (("--plot", plot), ("--json", json_file)):
        if path is not None and not path.parent.is_dir():
            raise OmniDraftError(f"{option} {path}: there is no folder {path.parent}; make it, or give another name")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise OmniDraftError(f"--plot {plot}: give a name that ends in .png or .svg")
    if plot is not None and find_spec("matplotlib") is None:
        raise OmniDraftError("--plot needs the package matplotlib; pip install matplotlib")
