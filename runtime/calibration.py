"""What is measured once per graph and device, and kept in the state folder: W₀, and how long passes take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.invariance import WIDEST, fingerprint, probe
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.pass_times import PassTimes
from omnidraft.runtime.policy import LONGEST_DRAFT
from omnidraft.runtime.state import State

FILE, SCHEMA = "calibration.json", "omnidraft-calibration/1"
PASTS = (64, 448, 960)
TARGET_WIDTHS = (1, 2, 3, 4, 5, 7, 9, LONGEST_DRAFT + 1)
DRAFTER_WIDTHS = (1, 2)
MOST_REPEATS, LEAST_REPEATS = 8, 2
SECONDS = 1.5  # after which no further repeat is begun


@dataclass(frozen=True)
class Calibration:
    """W₀ of a pair's target here, None if there is none; times of target passes and of draft steps."""

    w0: int | None
    target: PassTimes | None = None
    drafter: PassTimes | None = None


def calibrate(
    pair: Pair, state: State, times: bool = True, anew: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Calibration:
    """From the state, or measured now, in some seconds, and kept there.

    `times`: whether pass times are wanted, beside W₀; `anew`: measure in any case; `tell`: says so before it is done.
    """
    target, drafter = pair.target, pair.drafter
    known = {} if anew else state.load(FILE, SCHEMA, {}) or {}
    keys = [fingerprint(pair.graph_sha256, pair.threads, target.decoder.providers[0])]
    if drafter is not None:
        model = pair.bundle.files[drafter.info.model]["sha256"]
        keys.append(fingerprint(model, 1, drafter.decoder.providers[0]))
    found: dict[str, Any] = {key: dict(known.get(key, {})) for key in keys}
    missing = [key for key in keys if times and "passes" not in found[key]]
    if missing:
        tell("measuring how fast this device is, once for each model (some seconds)")
    changed = bool(missing)
    if "w0" not in found[keys[0]]:
        found[keys[0]]["w0"] = probe(target.decoder, target.info.context)
        changed = True
    if keys[0] in missing:
        found[keys[0]]["passes"] = pass_times(target.decoder, TARGET_WIDTHS, target.info.context).as_dict()
    if keys[-1] in missing and drafter is not None:
        found[keys[-1]]["passes"] = pass_times(drafter.decoder, DRAFTER_WIDTHS, drafter.info.context).as_dict()
    if changed:
        state.update(FILE, SCHEMA, {}, lambda old: {**(old or {}), **found})
    passes = [PassTimes.from_dict(found[key]["passes"]) if "passes" in found[key] else None for key in keys]
    return Calibration(found[keys[0]]["w0"], passes[0], passes[1] if drafter is not None else None)


def pass_times(decoder: Decoder, widths: tuple[int, ...], context: int) -> PassTimes:
    """Seconds of passes of a model with so many positions; widths take turns, as in rounds.

    The least of some repeats: what a pass takes when nothing disturbs it; the policy follows what disturbs all of
    them. What the past holds does not matter for time, so it is not fed.
    """
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
