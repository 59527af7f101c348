"""What is measured once per graph and device, and kept in the state folder: W₀, and how long passes take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.invariance import WIDEST, chunks_agree, fingerprint, probe
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.pass_times import PassTimes
from omnidraft.runtime.policy import LONGEST_DRAFT
from omnidraft.runtime.state import State
from omnidraft.runtime.static_decoder import exact_width

FILE, SCHEMA = "calibration.json", "omnidraft-calibration/1"
PASTS = (64, 448, 960)
TARGET_WIDTHS = (1, 2, 3, 4, 5, 7, 9, LONGEST_DRAFT + 1)
DRAFTER_WIDTHS = (1, 2)
MOST_REPEATS, LEAST_REPEATS = 8, 2
SECONDS = 1.5  # after which no further repeat is begun


@dataclass(frozen=True)
class Calibration:
    """W₀ of a pair's target here, None if there is none; times of target passes and of draft steps.

    `width`: without W₀, the rows of every pass that make rows agree after all (see `exact_width`), None for none;
    `reuse`: whether rows that a response left behind are those that a prompt with its text gets (see `chunks_agree`).
    """

    w0: int | None
    target: PassTimes | None = None
    drafter: PassTimes | None = None
    width: int | None = None
    reuse: bool = False

    @property
    def least_rows(self) -> int | None:
        """The rows that a pass must have at least for exact text, None if there is no such number."""
        return self.w0 or self.width


def calibrate(
    pair: Pair, state: State, times: bool = True, anew: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Calibration:
    """From the state, or measured now, in some seconds, and kept there.

    `times`: whether pass times are wanted, beside W₀; `anew`: measure in any case; `tell`: says so before it is done.
    """
    target, drafter = pair.target, pair.drafter
    known = {} if anew else state.load(FILE, SCHEMA, {}) or {}
    keys = [fingerprint(pair.graph_sha256, pair.threads, target.decoder.placed.actual)]
    if drafter is not None:
        keys.append(fingerprint(pair.bundle.digest(drafter.graph), 1, drafter.decoder.placed.actual))
    found: dict[str, Any] = {
        key: usable(known.get(key, {}), widest, state.warn)
        for key, widest in zip(keys, (TARGET_WIDTHS[-1], DRAFTER_WIDTHS[-1]), strict=False)
    }
    missing = [key for key in keys if times and "passes" not in found[key]]
    if missing:
        tell("measuring how fast this device is, once for each model (some seconds)")
    changed = bool(missing)
    if not {"w0", "reuse"} <= found[keys[0]].keys():
        w0 = probe(target.decoder, target.info.context)
        width = None if w0 else exact_width(target.decoder, target.info.context)
        rows = w0 or width
        reuse = rows is not None and chunks_agree(target.decoder, target.info.context, rows)
        found[keys[0]] |= {"w0": w0, "width": width, "reuse": reuse}
        changed = True
    if keys[0] in missing:
        found[keys[0]]["passes"] = pass_times(target.decoder, TARGET_WIDTHS, target.info.context).as_dict()
    if keys[-1] in missing and drafter is not None:
        found[keys[-1]]["passes"] = pass_times(drafter.decoder, DRAFTER_WIDTHS, drafter.info.context).as_dict()
    if changed:
        state.update(FILE, SCHEMA, {}, lambda old: {**(old or {}), **found})
    passes = [PassTimes.from_dict(found[key]["passes"]) if "passes" in found[key] else None for key in keys]
    times_of_drafter = passes[1] if drafter is not None else None
    rows = found[keys[0]]
    return Calibration(rows["w0"], passes[0], times_of_drafter, rows["width"], rows["reuse"])


def usable(entry: Mapping[str, Any], widest: int, warn: Callable[[str], None]) -> dict[str, Any]:
    """What a file has of one graph, without a W₀ that cannot be, and without pass times that cannot be or end early.

    `widest`: rows that they must reach.
    """
    known = dict(entry)
    if (known.get("w0") or 1) > WIDEST:  # never measured here
        del known["w0"]
    try:
        if "passes" in known and PassTimes.from_dict(known["passes"]).widths[-1] < widest:
            raise ValueError("pass times that are too narrow")
    except ValueError as why:
        warn(f"{FILE}: damaged: {why}; measuring them again")
        del known["passes"]
    return known


def pass_times(decoder: CausalModel, widths: tuple[int, ...], context: int) -> PassTimes:
    """Seconds of passes of a model with so many positions; widths take turns, as in rounds.

    The least of some repeats: what a pass takes when nothing disturbs it; the policy follows what disturbs all of
    them. What the past holds does not matter for time, so it is not fed. Where passes are padded, time takes steps:
    each is measured from both sides.
    """
    steps = {rows for width in decoder.widths for rows in (width, width + 1)}
    widths = tuple(sorted({rows for rows in steps if rows <= widths[-1]} | {1, widths[-1]})) if steps else widths
    most = max(1, context - widths[-1] - WIDEST)
    pasts = tuple(sorted({min(past, most) for past in PASTS}))
    decoder.reserve(pasts[-1] + widths[-1])
    rng = np.random.default_rng(0)
    ids = rng.integers(0, decoder.vocabulary, widths[-1]).tolist()
    taken = {(past, width): float("inf") for past in pasts for width in widths}
    for width in widths:
        decoder.length = 0
        decoder.run(ids[:width])  # the first pass of a width binds its arrays
    begin = perf_counter()
    for repeat in range(MOST_REPEATS):
        for past, width in taken:
            decoder.length = past
            before = decoder.seconds
            decoder.run(ids[:width])
            taken[past, width] = min(taken[past, width], decoder.seconds - before)
        if repeat + 1 >= LEAST_REPEATS and perf_counter() - begin > SECONDS:
            break
    decoder.rollback(0)
    return PassTimes(pasts, widths, tuple(tuple(taken[past, width] for width in widths) for past in pasts))
