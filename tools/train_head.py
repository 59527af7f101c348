"""omnidraft train-head: teach the acceptance head what a target accepts of a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from omnidraft.adapters.head import Calibration
    from omnidraft.adapters.rehearsal import Rehearsed
    from omnidraft.adapters.samples import Sample
    from omnidraft.runtime.pair import Pair

HELD_OUT = 5  # one prompt of so many is not learned from


def train_head(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task if you like.")],
    out: Annotated[Path, typer.Option(help="The drafter's folder, which the next export reads.")],
    target: o.Target = None,
    precision: o.Precision = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Prompts of each task. [default: all]")] = None,
    max_new_tokens: o.MaxNewTokens = 128,
    threads: o.Threads = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against observed acceptance (.png, .svg).")] = None,
) -> None:
    """Let a target answer prompts, and teach the drafter's acceptance head on them. Export again afterwards.

    One prompt in five is held out, and says how far predictions are from what is accepted.
    """
    from omnidraft.adapters.rehearsal import Rehearsed, teach
    from omnidraft.runtime.acceptance import HEAD_FILE, neutral
    from omnidraft.runtime.adapter_file import save_adapter
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.pair import load_pair
    from omnidraft.tools.measure import read_prompts

    if not out.is_dir():
        raise OmniDraftError(f"--out {out}: no such folder; give the drafter's, with its config.json")
    texts = [text for task in read_prompts(prompts, n).values() for text in task]
    if len(texts) < HELD_OUT:
        raise OmniDraftError(f"{prompts}: give at least {HELD_OUT} prompts; one in {HELD_OUT} is held out")
    pair = load_pair(bundle, target, precision, threads)
    if pair.head is None:
        raise OmniDraftError(f"{bundle}: its drafter gives no hidden states, so it has no acceptance head")
    rehearsed = _rehearse(pair, _answers(pair, texts, max_new_tokens))
    held = {t: Rehearsed.of(parts[::HELD_OUT]) for t, parts in rehearsed.items()}
    learned = Rehearsed.of(
        part for parts in rehearsed.values() for i, part in enumerate(parts) if i % HELD_OUT
    )  # fmt: skip
    start = neutral(pair.head.hidden_size)
    head = teach(learned)
    save_adapter(out / HEAD_FILE, head)
    print(f"{len(learned.labels)} proposals learned; on held-out answers, by temperature:")
    for temperature, part in held.items():
        before, after = _calibration(start, part), _calibration(head, part)
        print(
            f"{temperature:g}: {len(part.labels)} proposals, ECE {before.error:.3f} -> {after.error:.3f}, "
            f"bias {before.bias:+.3f} -> {after.bias:+.3f}"
        )
    if plot is not None:
        from omnidraft.tools.reliability import draw

        draw(plot, {f"temperature {t:g}": _calibration(head, part) for t, part in held.items()})
    print(f"{out / HEAD_FILE} written; export the bundle again to use it")


def _answers(pair: Pair, prompts: Sequence[str], max_new_tokens: int) -> list[list[Sample]]:
    """Samples of each answer; half of the prompts are answered greedily, half at temperature 0.7."""
    from rich.console import Console
    from rich.progress import track

    from omnidraft.adapters.samples import Spelling
    from omnidraft.runtime.calibration import calibrate
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.runtime.state import State

    nowhere = State(None, o.warn)
    engine = Engine(pair, Options("2"), nowhere, calibrate(pair, nowhere, times=False))
    engine.observing, spelling, found = True, Spelling.of(pair), []
    for i, prompt in enumerate(track(prompts, "answering", console=Console(stderr=True), transient=True)):
        engine.generate(prompt, sampling=Sampling((0.0, 0.7)[i % 2], seed=i), max_new_tokens=max_new_tokens)
        assert engine.observation is not None
        found.append(list(spelling.samples(engine.observation)))
    return [samples for samples in found if samples]


def _rehearse(pair: Pair, answers: Sequence[list[Sample]]) -> dict[float, list[Rehearsed]]:
    from omnidraft.adapters.rehearsal import TEMPERATURES, Rehearsal, Rehearsed

    rehearsal = Rehearsal(pair)
    return {
        temperature: [
            Rehearsed.of(rehearsal.run(sample, temperature, seed) for sample in samples)
            for seed, samples in enumerate(answers)
        ]
        for temperature in TEMPERATURES
    }


def _calibration(head: Mapping[str, NDArray[np.float32]], part: Rehearsed) -> Calibration:
    import numpy as np

    from omnidraft.adapters.head import calibration, logits

    return calibration(1 / (1 + np.exp(-logits(head, part.hidden, part.features))), part.labels)
