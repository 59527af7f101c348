"""omnidraft personalize and run --learn as a user meets them: sessions that go on, and errors of one line."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from test_cli import QUESTION, fails, omnidraft

from omnidraft.adapters.settings import Settings
from omnidraft.tools.draw import main as draw

pytestmark = pytest.mark.model
SHORT = ("--max-new-tokens", "12", "--threads", "2")
QUICK = (*SHORT, "--trainer", "onnx-step", "--rank", "4", "--rate", "3e-3", "--batch", "2", "--budget", "100")
QUESTIONS = [
    "How many legs do three cats have?", "What is the capital of France?", "Name a colour of the rainbow.",
    "Why do birds sing?", "How many days has a week?",
]  # fmt: skip


def write_prompts(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"task": task, "prompt": prompt}) + "\n" for task, prompt in rows))
    return path


@dataclass
class Run:
    """A session that was stopped and went on: eight prompts to learn from, in two tasks, and one held out of each."""

    folder: Path
    first: CompletedProcess[str]
    second: CompletedProcess[str]

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out.json").read_text())
        return found


@pytest.fixture(scope="module")
def session(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("session")
    same = [(task, QUESTIONS[0]) for task in ("cats", "legs") for _ in range(4)]
    rows = [*same[:4], ("cats", QUESTIONS[1]), *same[4:], ("legs", QUESTIONS[3])]
    prompts = write_prompts(folder / "prompts.jsonl", rows)
    common = ("personalize", bundle, "--prompts", prompts, "--state", folder / "state", *QUICK, "--interval", "1")
    first = omnidraft(*common, "--rounds", "2", "--test", "0")
    second = omnidraft(*common, "--test", "1", "--plot", folder / "out.svg", "--json", folder / "out.json")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    return Run(folder, first, second)


def test_a_session_says_what_it_learns(session: Run) -> None:
    assert session.first.stdout == "", "without held-out prompts there is no table"
    assert "round 1 with onnx-step: loss" in session.first.stderr and "round 3" not in session.first.stderr
    assert "agreement on unseen text" in session.second.stderr and "kept as version 1" in session.second.stderr


def test_a_session_goes_on_where_it_was_stopped(session: Run) -> None:
    assert "going on" not in session.first.stderr
    assert "going on behind the 2 prompts that were learned from already" in session.second.stderr
    assert "round 3" in session.second.stderr
    document = session.document["session"]
    assert document["done"] == len(document["responses"]) == 8
    assert [row[0] for row in document["responses"]] == ["cats"] * 4 + ["legs"] * 4
    assert [row[0] for row in document["rounds"]] == [1, 2, 3, 4, 5, 6, 7], "the eighth was set apart"


def test_a_session_ends_with_a_table_of_before_and_after(session: Run) -> None:
    for word in ("as shipped", "learned", "plain", "cats", "legs"):
        assert word in session.second.stdout, word
    rows = session.document["rows"]
    assert [(row["task"], row["row"]) for row in rows if row["row"] != rows[0]["row"]] == [
        (task, row) for task in ("cats", "legs") for row in ("as shipped", "learned")
    ]
    assert all(row["n"] == 1 for row in rows)
    assert all(row["same_text"] in (None, row["n"]) for row in rows) and rows[-1]["same_text"] == 1
    assert session.document["settings"]["rank"] == 4


def test_a_session_is_drawn(session: Run) -> None:
    picture = (session.folder / "out.svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "<svg" in picture
    assert f"{session.folder / 'out.svg'}: the session as a picture" in session.second.stdout


def test_sessions_are_drawn_one_behind_the_other(session: Run, tmp_path: Path) -> None:
    written = session.folder / "out.json"
    draw([str(tmp_path / "two.svg"), f"twice={written}+{written}", f"once={written}"])
    picture = (tmp_path / "two.svg").read_text()
    assert "<!-- twice -->" in picture and "<!-- once -->" in picture


def test_a_file_that_was_learned_to_its_end_begins_anew(bundle: Path, session: Run, tmp_path: Path) -> None:
    state = Path(shutil.copytree(session.state, tmp_path / "state"))
    common = ("personalize", bundle, "--prompts", session.folder / "prompts.jsonl", *QUICK, "--interval", "1")
    done = omnidraft(*common, "--state", state, "--rounds", "1", "--test", "0")
    assert done.returncode == 0, done.stderr
    assert "its 8 prompts were all learned from; beginning anew" in done.stderr


def test_run_drafts_with_what_was_learned(bundle: Path, session: Run, tmp_path: Path) -> None:
    """Two copies of a state, so that the n-gram cache is the same; in one the drafter goes back to as shipped."""
    reports = {}
    for name in ("learned", "shipped"):
        state = Path(shutil.copytree(session.state, tmp_path / name))
        if name == "shipped":
            assert omnidraft("adapters", "rollback", bundle, "--to", "0", "--state", state).returncode == 0
        done = omnidraft("run", bundle, QUESTION, "--state", state, "--json", "--draft", "4", *SHORT)
        assert done.returncode == 0, done.stderr
        reports[name] = json.loads(done.stdout)
    assert reports["learned"]["text"] == reports["shipped"]["text"]
    assert reports["learned"]["tokens_per_verify"] > reports["shipped"]["tokens_per_verify"]


def test_run_learns_from_call_to_call(bundle: Path, tmp_path: Path) -> None:
    """Answers wait in the state folder until there are enough; another call learns from them."""
    enough, state = Settings().interval, tmp_path / "state"
    prompts = write_prompts(tmp_path / "p.jsonl", [(str(i), QUESTIONS[i % 5]) for i in range(enough)])
    waits = ("--interval", "10000", "--test", "0", "--prompts", prompts, "--state", state, *QUICK)
    assert "round" not in omnidraft("personalize", bundle, *waits).stderr
    said = []
    for question in QUESTIONS[:3]:
        learns = ("--learn", "on", "--trainer", "onnx-step", "--verbose", "--state", state, *SHORT)
        done = omnidraft("run", bundle, question, *learns)
        assert done.returncode == 0, done.stderr
        said.append("learned for" in done.stderr)
    assert sum(said) == 1, "once for the answers that waited, and then there are too few again"
    (path,) = state.rglob("learning.json")
    assert json.loads(path.read_text())["payload"]["responses"] == enough + 3
    done = omnidraft("run", bundle, QUESTIONS[0], "--state", state, *SHORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["payload"]["responses"] == enough + 3, "without --learn on nothing is kept"

    assert omnidraft("adapters", "forget", "--state", state, "--yes").returncode == 0
    assert {path.name for path in state.rglob("*")} == {".lock", "omnidraft-state.txt"}


def test_bad_options_are_one_clear_line(bundle: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [("a", "b")])
    started = ("personalize", bundle, "--state", tmp_path / "state", "--prompts", prompts)
    for bad, line in (
        (("--trainer", "torch"), "trainer must be auto"), (("--loss", "mse"), "loss must be projected or paper"),
        (("--lambda", "much"), "give a number, or dynamic"), (("--lambda", "nan"), "lambda must be from 0 to 10"),
        (("--rate", "0"), "rate must be above 0"), (("--plot", "x.jpg"), "ends in .png or .svg"),
        (("--plot", tmp_path / "no" / "x.svg"), "there is no folder"),
        (("--json", tmp_path / "no" / "x.json"), "there is no folder"), (("--draft", "off"), "--draft off"),
        (("--prompts", tmp_path / "none.jsonl"), "cannot be read"),
    ):  # fmt: skip
        assert line in fails(*started, *bad), bad
    asked = ("run", bundle, "hi", "--state", tmp_path / "state")
    for wrong, line in (
        (("--trainer", "onnx-step"), "--learn on"), (("--learn", "maybe"), "choose on or off"),
        (("--learn", "on", "--draft", "off"), "needs a drafter"),
    ):  # fmt: skip
        assert line in fails(*asked, *wrong), wrong
    assert "leave --no-state out" in fails("run", bundle, "hi", "--learn", "on", "--no-state")
    assert not (tmp_path / "state").exists(), "nothing was begun"


def test_a_drafter_that_cannot_learn_is_one_clear_line(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy", copy_function=os.link))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["drafter"] |= {"trainable": False, "lora": None, "training": None}
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    prompts = write_prompts(tmp_path / "p.jsonl", [("a", "b")])
    for command in (("personalize", copy, "--prompts", prompts), ("run", copy, "hi", "--learn", "on")):
        assert "has no LoRA inputs" in fails(*command, "--state", tmp_path / "state")
