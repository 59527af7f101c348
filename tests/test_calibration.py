"""What is measured of a device, and how often."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import NOWHERE, Loaded

from omnidraft.runtime.calibration import FILE, PASTS, TARGET_WIDTHS, calibrate, pass_times
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.state import State
from omnidraft.tools.calibrate import break_even

pytestmark = pytest.mark.model


def test_it_is_measured_once_and_kept(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    pair, said = loaded["int8"].pair, list[str]()
    first = calibrate(pair, State(tmp_path, pytest.fail), tell=said.append)
    assert len(said) == 1 and first.target is not None and first.drafter is not None
    again = calibrate(pair, State(tmp_path, pytest.fail), tell=pytest.fail)
    assert again == first
    other = calibrate(replace(pair, threads=pair.threads + 1), State(tmp_path, pytest.fail), tell=said.append)
    assert len(said) == 2 and other.target != first.target, "another number of threads is another device"
    calibrate(pair, State(tmp_path, pytest.fail), anew=True, tell=said.append)
    assert len(said) == 3


def test_w0_alone_takes_no_pass_times(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    """Fixed lengths need none; what is measured later joins what is known."""
    pair = loaded["int8"].pair
    found = calibrate(pair, State(tmp_path, pytest.fail), times=False, tell=pytest.fail)
    assert (found.w0, found.target, found.drafter) == (loaded["int8"].w0, None, None)
    assert calibrate(pair, State(tmp_path, pytest.fail)).w0 == found.w0
    known = json.loads((tmp_path / FILE).read_text())["payload"]
    assert len(known) == 2 and sum("w0" in entry for entry in known.values()) == 1
    with pytest.raises(ValueError, match="pass times"):
        Engine(pair, Options("cost"), NOWHERE, found)


def test_pass_times_say_what_a_pass_takes(loaded: dict[str, Loaded]) -> None:
    decoder = loaded["int8"].pair.target.decoder
    found = pass_times(decoder, TARGET_WIDTHS, 8192)
    assert (found.pasts, found.widths) == (PASTS, TARGET_WIDTHS) and decoder.length == 0
    for row in found.seconds:
        assert all(0 < seconds < 60 for seconds in row)
        assert row[-1] > row[0], "seventeen rows are more work than one"
    short = pass_times(decoder, (1, 2), 40)
    assert max(short.pasts) + 2 <= 40, "it stays inside a small model's positions"


def test_break_even_is_where_drafting_is_as_quick_as_none() -> None:
    flat = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert break_even(flat, 0.0, 4, 1) == pytest.approx(0, abs=1e-6)
    assert break_even([0.0, 1.0, 1.5], 0.1, 1, 1) == pytest.approx(0.6)
    assert break_even([0.0, 1.0, 3.0], 0.0, 1, 1) is None
    half = break_even([0.0, 1.0, 1.2, 1.4], 0.1, 2, 1)
    assert half is not None and 1 + half + half**2 == pytest.approx(1.6)
