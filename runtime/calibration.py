"""What is measured once per graph and device, and kept in the state folder."""

from __future__ import annotations

from omnidraft.runtime.invariance import fingerprint, probe
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.state import State

FILE, SCHEMA = "calibration.json", "omnidraft-calibration/1"


def least_rows(pair: Pair, state: State) -> int | None:
    """W₀ of the pair's target graph here, from the state or measured now; None if there is none."""
    decoder = pair.target.decoder
    key = fingerprint(pair.graph_sha256, pair.threads, decoder.providers[0])
    known = state.load(FILE, SCHEMA, {}) or {}
    if key not in known:
        known = {key: {"w0": probe(decoder, pair.target.info.context)}}
        state.update(FILE, SCHEMA, {}, lambda old: {**(old or {}), **known})
    w0: int | None = known[key]["w0"]
    return w0
