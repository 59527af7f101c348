"""What a bench compares: plain decoding, and drafting with some lengths and vocabulary maps."""

from __future__ import annotations

from collections.abc import Sequence

from omnidraft.runtime.calibration import Calibration
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.state import State
from omnidraft.runtime.translation import Mode
from omnidraft.tools import options as o
from omnidraft.tools.learned import Learned

NO_LOOKUP = "cost-no-look-up"
MODES = {"direct": Mode.DIRECT, "online": Mode.ONLINE, "static": Mode.STATIC, "full": Mode.FULL}


def make_rows(pair: Pair, choices: Sequence[Options], calibration: Calibration) -> dict[str, Engine]:
    """One engine per row of the bench, without a cache, all on the same loaded pair."""
    modes = {choice.mode for choice in choices}
    names = {Mode.DIRECT: "direct", Mode.ONLINE: "direct + cache", Mode.STATIC: "static", Mode.FULL: "static + cache"}
    rows = {"plain, 1 row": Options("off", "near"), f"plain, {calibration.least_rows or 1} rows": Options("off")}
    for choice in choices:
        draft = f"k = {choice.draft}" if choice.fixed else choice.draft
        draft += "" if choice.lookup or not choice.measured else ", no look-up"
        rows[draft if len(modes) == 1 else f"{draft}, {names[choice.mode]}"] = choice
    return {row: engine_for(pair, chosen, calibration) for row, chosen in rows.items()}


def engine_for(pair: Pair, options: Options, calibration: Calibration, learned: Learned | None = None) -> Engine:
    """An engine that keeps nothing, with what was learned for it."""
    engine = Engine(pair, options, State(None, o.warn), calibration)
    if learned is not None:
        engine.use_adapter(learned.parameters, learned.head)
    return engine


def choose(drafts: str, maps: str, lossless: str, verification: str) -> list[Options]:
    """What each drafting row decodes with. Raises OmniDraftError for what is unknown or leaves nothing to compare."""
    modes = [part.strip() for part in maps.split(",")]
    for mode in modes:
        if mode not in MODES:
            raise OmniDraftError(f"--map {mode}: choose from {', '.join(MODES)}")
    rows = []
    for draft in (part.strip() for part in drafts.split(",")):
        if draft == "off":
            raise OmniDraftError("bench compares drafting with plain decoding; --draft off leaves nothing to compare")
        lookup, draft = draft != NO_LOOKUP, "cost" if draft == NO_LOOKUP else draft
        rows += [Options(draft, lossless, verification, MODES[mode], lookup) for mode in modes]
    return rows
