"""omnidraft soak: a short one that holds, limits that are broken and found out, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from registry import FAMILIES, Models, target_name
from test_cli import omnidraft
from typer.testing import CliRunner

from omnidraft.runtime import generation
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.state import State
from omnidraft.runtime.verification import Verdict
from omnidraft.tools import soak_loop
from omnidraft.tools.cli import app
from omnidraft.tools.soak_limits import BOUNDS, GROWTH, MEANT, WARM_UP, Limit, limits
from omnidraft.tools.soak_loop import Cycle, Leg, Soak

pytest.importorskip("torch")
PROMPTS = ("The boat came back", "def total(values):", "A train travels")
FAST = ("--max-new-tokens", "8", "--threads", "1")
MIB = 1 << 20


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"task": task, "prompt": f"{prompt} {task}"} for task in ("boats", "code") for prompt in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "far too long " * 200}]))
    return path


@pytest.fixture(scope="module")
def pair(toy_models: Models) -> Pair:
    return load_pair(toy_models.bundle, threads=1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles of few answers, each of which is compared."""
    monkeypatch.setattr(soak_loop, "POLICIES", (("4", True), ("4", False)))
    monkeypatch.setattr(soak_loop, "COMPARED", 1.0)
    monkeypatch.setattr(soak_loop, "ANSWERS", 1)


def of(found: Sequence[Limit], word: str) -> list[Limit]:
    return [limit for limit in found if limit.line.startswith(word)]


def test_a_short_soak_holds_its_limits(toy_models: Models, prompts: Path, tmp_path: Path) -> None:
    """All targets and policies take part, and nothing of it is left."""
    before = set(Path(tempfile.gettempdir()).glob("omnidraft-soak-*"))
    outputs = ("--json", tmp_path / "soak.json", "--plot", tmp_path / "soak.svg")
    done = omnidraft("soak", toy_models.bundle, "--prompts", prompts, "--minutes", "0.6", *FAST, *outputs)
    assert done.returncode == 0, done.stderr
    assert "1 of 7 prompts are too long" in done.stderr
    for line in ("held: state:", "held: text:", "held: no complaint"):
        assert line in done.stdout
    document = json.loads((tmp_path / "soak.json").read_text())
    cycle = document["cycles"][0]
    assert set(cycle["acceptance"]) == {target_name(family) for family in FAMILIES}
    assert cycle["answers"] == len(FAMILIES) * len(soak_loop.POLICIES) * soak_loop.ANSWERS
    assert 0 < cycle["cancelled"] < cycle["answers"] / 2 and cycle["memory"] > 10 * MIB and cycle["tokens"] > 100
    assert cycle["first_token"] == sorted(cycle["first_token"]) and min(cycle["round"]) > 0
    for room in ("pairs/", "answers/", "learning/", "calibration.json"):
        assert any(name.startswith(room) for name in cycle["state"])
    assert [limit["held"] for limit in document["limits"]].count(True) >= 3
    assert (tmp_path / "soak.svg").read_text().startswith("<?xml")
    assert set(Path(tempfile.gettempdir()).glob("omnidraft-soak-*")) == before


def test_ctrl_c_ends_with_the_report_so_far(toy_models: Models, prompts: Path) -> None:
    command = [sys.executable, "-m", "omnidraft.tools.cli", "soak", str(toy_models.bundle), "--prompts", str(prompts)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell lets its background jobs ignore it
    process = subprocess.Popen(
        [*command, *FAST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    )
    assert process.stderr is not None
    while "min:" not in (line := process.stderr.readline()):  # the first cycle is done
        assert line, "it ended by itself"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "accepted" in out and "not checked: memory" in out and "held: state" in out
    assert "interrupted" in errors and "Traceback" not in errors


def _believe(rows: np.ndarray, proposed: Sequence[int], *_: Any) -> Verdict:
    return Verdict([*proposed, int(rows[len(proposed)].argmax())], len(proposed))


def test_a_text_that_differs_is_status_1_and_a_line(
    toy_models: Models, prompts: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a verification that believes every proposal."""
    monkeypatch.setattr(generation, "verify", _believe)
    command = ["soak", str(toy_models.bundle), "--prompts", str(prompts), "--minutes", "0.1", *FAST]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    broken = [line for line in done.stderr.splitlines() if line.startswith("omnidraft: text: answer")]
    assert broken and "is not plain decoding's" in broken[0] and "seed" in broken[0]


def soaked(pair: Pair, folder: Path, cycles: int, leak: int, complaints: list[str]) -> list[Limit]:
    """The verdict on some cycles, of which each answer leaks so many bytes."""
    run = Soak([pair], PROMPTS, State(folder, complaints.append), 8, complaints.append)
    leaked: list[np.ndarray] = []

    def advance(_: Leg) -> None:
        leaked.append(np.ones(leak, np.uint8))

    for _ in range(cycles):
        assert run.cycle(lambda: True, advance)
    return limits(run, complaints)


def test_memory_that_grows_is_found_out(pair: Pair, few: None, tmp_path: Path) -> None:
    """The first run is the control's control: the same cycles without a leak."""
    enough = WARM_UP + 2 * MEANT
    assert all(limit.held for limit in soaked(pair, tmp_path / "tight", enough, 0, []))
    (memory,) = of(soaked(pair, tmp_path / "leak", enough, 20 * MIB, []), "memory")
    assert memory.held is False and "limit +2%" in memory.line
    (short,) = of(soaked(pair, tmp_path / "short", 2, 0, []), "memory")
    assert short.held is None and "give more --minutes" in short.line


def test_state_files_out_of_bounds_and_complaints_are_found_out(pair: Pair, few: None, tmp_path: Path) -> None:
    complaints: list[str] = []
    run = Soak([pair], PROMPTS, State(tmp_path, complaints.append), 8, complaints.append)
    assert run.cycle(lambda: True, lambda leg: None)
    assert all(limit.held is not False for limit in limits(run, complaints))
    (tmp_path / "notes.txt").write_text("a stranger")
    (tmp_path / "calibration.json").write_bytes(b"0" * (BOUNDS["calibration.json"][0] + 1))
    (tmp_path / "learning" / "one").mkdir(parents=True)
    for name in ("a.bin", "b.bin"):
        (tmp_path / "learning" / "one" / "candidate").mkdir(exist_ok=True)
        (tmp_path / "learning" / "one" / "candidate" / name).touch()
    complaints.append("calibration.json: damaged")
    broken = [limit.line for limit in limits(run, complaints) if limit.held is False]
    assert len(broken) == 4
    for word in ("notes.txt", "calibration.json has", "more than 1", "complaint"):
        assert any(word in line for line in broken)


@pytest.mark.parametrize(("last", "held"), [(1 + GROWTH / 2, True), (1 + 2 * GROWTH, False), (0.5, True)])
def test_growth_is_of_medians_after_warm_up(last: float, held: bool) -> None:
    """One cycle that needs much is no growth, nor is what the first ones need."""
    resident = [1, 50, 90, *[100] * 3, 500, *[100 * last] * 3]
    cycles = [Cycle(0, 1, 1, 0, 1, 1.0, {}, [0.0] * 3, [0.0] * 3, int(size * MIB), 0, {}) for size in resident]

    class Run:
        differing: Sequence[str] = ()
        compared = 1

        def __init__(self) -> None:
            self.cycles = cycles

        def state_files(self) -> dict[str, int]:
            return {}

    (memory,) = of(limits(Run(), []), "memory")  # type: ignore[arg-type]
    assert memory.held is held


def test_refusals_are_one_line(toy_models: Models, prompts: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "far too long " * 200}) + "\n")
    for line, *command in (
        ("cannot be read", toy_models.bundle, "--prompts", tmp_path / "none.jsonl"),
        (".png or .svg", toy_models.bundle, "--prompts", prompts, "--plot", tmp_path / "soak.txt"),
        ("no such bundle", tmp_path / "none", "--prompts", prompts),
        ("none of the prompts fits", toy_models.bundle, "--prompts", long),
    ):
        done = CliRunner().invoke(app, ["soak", *map(str, command)])
        assert done.exit_code == 1 and done.stdout == ""
        assert line in done.stderr and done.stderr.startswith("omnidraft: ") and done.stderr.count("\n") == 1
