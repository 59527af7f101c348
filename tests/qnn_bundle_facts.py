"""Run in a process of its own, where onnxruntime-qnn can be imported: decodes a bundle on the simulator; prints JSON.

One model with random weights is drafter and target, so that much is accepted; a trained pair says how close choices
are. The simulator takes half a second for a pass of ten million weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from checkpoints import write_checkpoint

from omnidraft.export import cache, parity
from omnidraft.export.order import Order, read_profiles
from omnidraft.export.pipeline import export
from omnidraft.runtime import compiled
from omnidraft.runtime.bundle import MANIFEST, open_bundle
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.placed import warnings
from omnidraft.runtime.placement import Wishes, read_wishes
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.static_decoder import exact_width

PROMPTS = ("The boat came back", "def total(values):")
QUESTION = ("Why is the sky blue?",)
LENGTH, ROOM = 24, 160
NOWHERE = State(None, lambda line: None)


class Quiet:
    def plan(self, steps: int) -> None: ...
    def step(self, what: str) -> None: ...
    def note(self, text: str) -> None: ...


def make(drafter: str, target: str, out: Path, profiles: str, *precisions: str) -> Path:
    export(Order(drafter, {"one": target}, out, precisions, "int8", 1, read_profiles(profiles), ROOM), Quiet())
    return out


def answers(pair: Pair, measured: Calibration, draft: str, prompts: Sequence[str]) -> tuple[list[list[int]], int]:
    """Tokens of an answer to each prompt, greedy and sampled, and how many proposals were accepted."""
    engine, found, accepted = Engine(pair, Options(draft), NOWHERE, measured), [], 0
    for seed, prompt in enumerate(prompts):
        for sampling in (Sampling(), Sampling(0.8, top_p=0.95, seed=seed)):
            report = engine.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
            found.append(report.tokens)
            accepted += report.counts["accepted"]
    return found, accepted


def measured_here(pair: Pair) -> Calibration:
    """W₀ of a pair's target on this device, or the width in its place."""
    return calibrate(pair, NOWHERE, times=False)


def of_one_width(pair: Pair) -> Calibration:
    """What is measured where no number of rows agrees across widths, whether or not this is such a device."""
    return Calibration(None, width=exact_width(pair.target.decoder, pair.target.info.context))


def texts(
    bundle: Path,
    ep: str,
    precision: str,
    prompts: Sequence[str] = PROMPTS,
    measure: Callable[[Pair], Calibration] = measured_here,
) -> dict[str, Any]:
    """Drafted and plain text on one placement, and how many rows the target's passes had."""
    pair = load_pair(bundle, None, precision, 1, wishes=read_wishes(ep, strict=True))
    measured = measure(pair)
    rows, run = set[int](), pair.target.decoder.run

    def counting(ids: Sequence[int]) -> np.ndarray:
        rows.add(len(ids))
        return run(ids)

    pair.target.decoder.run = counting  # type: ignore[method-assign]
    plain, _ = answers(pair, measured, "off", prompts)
    drafted, accepted = answers(pair, measured, "3", prompts)
    del pair.target.decoder.run  # a circle, in which QNN's sessions would outlive their turn
    return {
        "providers": {model: placed.share for model, placed in pair.placement.items()},
        "profiles": {model: graph.profile for model, graph in pair.graphs.items()},
        "precision": pair.precision,
        "w0": measured.w0,
        "width": measured.width,
        "rows": sorted(rows),
        "plain": plain,
        "drafted": drafted,
        "accepted": accepted,
    }


def opened(bundle: Path, wishes: Wishes) -> dict[str, Any]:
    """Where a bundle is placed and what is said about it, or the line that refuses."""
    try:
        pair = load_pair(bundle, wishes=wishes)
    except OmniDraftError as error:
        return {"refused": str(error)}
    said = warnings(pair.placement)
    return {"profile": pair.target.graph.profile, "actual": pair.target.decoder.placed.actual, "warnings": said}


def both(bundle: Path, ep: str) -> dict[str, Any]:
    """As `opened`, with and without --strict-ep."""
    return {name: opened(bundle, read_wishes(ep, name == "strict")) for name in ("lenient", "strict")}


def on_another_device(bundle: Path, ep: str) -> str:
    """The profile for a machine without the simulator whose SoC ONNX Runtime cannot tell, or the line that refuses.

    Nothing is loaded: this machine cannot run it.
    """
    opened, here = open_bundle(bundle), compiled.simulated
    compiled.simulated = lambda: False
    try:
        return compiled.fitting(opened, opened.targets["one"].graphs, read_wishes(ep).target)
    except OmniDraftError as error:
        return str(error)
    finally:
        compiled.simulated = here


def spoilt(bundle: Path, out: Path) -> Path:
    """A copy in which one byte of the target's binaries is another."""
    shutil.copytree(bundle, out)
    for path in out.glob("targets/*/qnn-simulator-*/*_qnn.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return out


def main(folder: Path) -> None:
    ort.set_default_logger_severity(4)
    real = make("default", "qwen3-10m", folder / "real", "cpu,qnn:simulator", "fp32")
    cache.cache_root = lambda: folder / "cache"
    parity.THRESHOLDS["a16w8"] = parity.Threshold(0.3)  # random weights leave no clear choices
    model = str(write_checkpoint(folder / "model"))
    bundle = make(model, model, folder / "bundle", "cpu,static,qnn:SM8550,X-Elite,simulator", "fp32", "a16w8")
    shipped = make(model, model, folder / "shipped", "cpu,qnn:SM8550,X-Elite", "fp32")
    runs = {
        "both": texts(bundle, "qnn", "fp16"),
        "both, a16w8": texts(bundle, "qnn", "a16w8"),
        "target": texts(bundle, "target=qnn,drafter=cpu", "fp16"),
        "drafter": texts(bundle, "target=cpu,drafter=qnn", "fp32"),
        "one width": texts(bundle, "target=qnn,drafter=cpu", "fp16", measure=of_one_width),
        "one width, a16w8": texts(bundle, "target=qnn,drafter=cpu", "a16w8", measure=of_one_width),
        "trained": texts(real, "target=qnn,drafter=cpu", "fp16", QUESTION),
    }
    facts = {
        "manifests": {path.name: json.loads((path / MANIFEST).read_bytes()) for path in (bundle, shipped, real)},
        "runs": runs,
        "auto": both(bundle, "auto"),
        "another SoC": both(shipped, "qnn"),
        "a SoC by name": both(bundle, "qnn:SM8550"),
        "elsewhere": {ep: on_another_device(shipped, ep) for ep in ("qnn", "qnn:SM8550", "qnn:X-Elite", "qnn:SM8650")},
        "damaged": both(spoilt(bundle, folder / "spoilt"), "target=qnn,drafter=cpu"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
