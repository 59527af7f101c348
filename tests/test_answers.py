"""Earlier answers survive a restart, a second process and damage, within their bound, until they are forgotten."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.runtime import state as state_module
from omnidraft.runtime.answers import SCHEMA, Answers
from omnidraft.runtime.lookup import MOST_TOKENS, LookUp
from omnidraft.runtime.state import LOCK, MARKER, Key, State

DOCUMENT = "pairs/one/answers.json"
KEY: Key = {"target": "a" * 64, "tokenizer": "b" * 64}
VOCABULARY = 1000
ONE, TWO, THREE = [1, 2, 3, 4], [5, 6, 7, 8, 9], [3, 3, 3, 3]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def answers_of(folder: Path | None, lines: list[str], vocabulary: int = VOCABULARY, **key: str) -> Answers:
    """As another process would open them."""
    return Answers(State(folder, lines.append), DOCUMENT, {**KEY, **key}, vocabulary)


def write(folder: Path, lines: list[str], *answers: list[int]) -> Path:
    kept = answers_of(folder, lines)
    for answer in answers:
        kept.add(answer)
    kept.save()
    assert kept.path is not None
    return kept.path


def sealed(path: Path, payload: Any) -> None:
    """Write a payload with a right checksum: only what is in it can be wrong."""
    path.write_bytes(state_module._document(SCHEMA, KEY, payload))


def test_answers_come_back_oldest_first_and_the_file_says_what_they_are_of(folder: Path, lines: list[str]) -> None:
    assert answers_of(folder, lines).load() == []
    path = write(folder, lines, ONE, TWO)
    write(folder, lines, THREE)
    assert answers_of(folder, lines).load() == [ONE, TWO, THREE]
    document = json.loads(path.read_text())
    assert path == folder / DOCUMENT and document["schema"] == SCHEMA and document["key"] == KEY
    assert lines == []


def test_a_look_up_finds_after_a_restart_what_it_found_before(folder: Path, lines: list[str]) -> None:
    running, kept = LookUp(), answers_of(folder, lines)
    for answer in (ONE, TWO, ONE, THREE, [9, 1, 2, 8]):
        running.remember(answer)
        kept.add(answer)
    kept.save()
    restarted, fresh = LookUp(answers_of(folder, lines).load()), LookUp()
    for prompt in ([1, 2], [9, 1, 2], [5, 6], [3, 3]):
        for lookup in (running, restarted, fresh):
            lookup.begin(prompt)
        assert restarted.find(4) == running.find(4) != fresh.find(4)


def test_an_answer_given_again_is_kept_once_in_its_newest_place(folder: Path, lines: list[str]) -> None:
    write(folder, lines, ONE, TWO, THREE, TWO)
    assert answers_of(folder, lines).load() == [ONE, THREE, TWO]
    write(folder, lines, ONE)
    assert answers_of(folder, lines).load() == [THREE, TWO, ONE]


def test_numpy_ids_are_written_as_numbers(folder: Path, lines: list[str]) -> None:
    write(folder, lines, np.array(ONE, dtype=np.int64))  # type: ignore[arg-type]
    assert answers_of(folder, lines).load() == [ONE]


def test_two_processes_both_keep_theirs(folder: Path, lines: list[str]) -> None:
    first, second = answers_of(folder, lines), answers_of(folder, lines)
    assert first.load() == second.load() == []
    first.add(ONE)
    second.add(TWO)
    first.save()
    second.save()
    first.add(THREE)
    first.save()
    assert first.load() == second.load() == [ONE, TWO, THREE] and lines == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([ONE, TWO, THREE, "save", "restart"])), max_size=15))
def test_any_order_of_two_processes_keeps_all_that_was_saved(steps: list[tuple[int, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        both = [answers_of(Path(folder), []) for _ in range(2)]
        added: list[list[list[int]]] = [[], []]  # not yet saved, by process
        kept: list[list[int]] = []
        for who, what in steps:
            if what == "restart":
                both[who], added[who] = answers_of(Path(folder), []), []
            elif what == "save":
                both[who].save()
                new = [a for i, a in enumerate(added[who]) if a not in added[who][i + 1 :]]
                kept, added[who] = [a for a in kept if a not in new] + new, []
            else:
                both[who].add(what)
                added[who].append(what)
            assert both[1 - who].load() == kept


def test_nothing_is_written_where_nothing_is_new(folder: Path, lines: list[str]) -> None:
    kept = answers_of(folder, lines)
    kept.save()
    assert not (folder / DOCUMENT).exists()
    kept.add(ONE)
    kept.save()
    written = (folder / DOCUMENT).stat().st_mtime_ns
    kept.load()
    kept.save()
    assert (folder / DOCUMENT).stat().st_mtime_ns == written
    kept.add(TWO)
    kept.save()
    assert (folder / DOCUMENT).stat().st_mtime_ns != written


def test_what_could_not_be_saved_is_saved_later(folder: Path, lines: list[str]) -> None:
    kept = answers_of(folder, lines)
    (folder / "pairs").write_text("in the way")
    kept.add(ONE)
    kept.save()
    assert len(lines) == 1 and "not saved" in lines[0] and str(folder / DOCUMENT) in lines[0]
    (folder / "pairs").unlink()
    kept.add(TWO)
    kept.save()
    assert answers_of(folder, lines).load() == [ONE, TWO] and len(lines) == 1


def test_what_is_too_short_or_too_long_is_not_kept(folder: Path, lines: list[str]) -> None:
    write(folder, lines, [], [1, 2, 3], [1] * (MOST_TOKENS + 1), ONE)
    assert answers_of(folder, lines).load() == [ONE] and lines == []


def test_there_are_never_too_many_tokens_and_the_oldest_go(folder: Path, lines: list[str]) -> None:
    size = MOST_TOKENS // 4
    long = [[n] * size for n in range(6)]
    write(folder, lines, *long[:3])
    write(folder, lines, *long[3:5])
    assert answers_of(folder, lines).load() == long[1:5]
    write(folder, lines, ONE)
    assert answers_of(folder, lines).load() == [*long[2:5], ONE]
    write(folder, lines, *long)  # more at once than there is room for
    assert answers_of(folder, lines).load() == long[2:] and lines == []


def test_ids_that_the_target_does_not_have_are_not_kept(folder: Path, lines: list[str]) -> None:
    write(folder, lines, [1, 2, 3, VOCABULARY], ONE, [1, 2, 3, -1])
    assert answers_of(folder, lines).load() == [ONE]
    assert len(lines) == 2 and all("outside the vocabulary of 1000" in line for line in lines)


def test_ids_in_the_file_that_the_target_does_not_have_are_dropped_in_one_line(folder: Path, lines: list[str]) -> None:
    path = write(folder, lines, ONE, [1, 2, 3, 999], TWO, [7, 7, 7, 500])
    small = answers_of(folder, lines, vocabulary=500)
    assert small.load() == [ONE, TWO]
    assert len(lines) == 1 and lines[0].startswith(f"{path}: 2 of 4 answers dropped") and "\n" not in lines[0]
    small.add(THREE)
    small.save()
    assert len(lines) == 2
    assert answers_of(folder, lines).load() == [ONE, TWO, THREE] and len(lines) == 2


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ([ONE, TWO, ONE], [TWO, ONE]),
        ([[1] * MOST_TOKENS, ONE], [ONE]),
        ([[1] * 9, [1, 2, 3, 5000]], [[1] * 9]),
    ],
    ids=["the same twice", "too much", "an id too large"],
)
def test_a_file_that_another_program_wrote_is_held_to_the_same_rules(
    folder: Path, lines: list[str], found: list[list[int]], left: list[list[int]]
) -> None:
    sealed(write(folder, lines, ONE), {"answers": found})
    assert answers_of(folder, lines).load() == left
    assert len(lines) == 1 and "1 of" in lines[0]


def test_ids_are_whole_numbers_also_where_the_file_has_a_point(folder: Path, lines: list[str]) -> None:
    sealed(write(folder, lines, ONE), {"answers": [[5.0, 6, 7, 8]]})
    loaded = answers_of(folder, lines).load()
    assert loaded == [[5, 6, 7, 8]] and all(type(i) is int for i in loaded[0])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "one id changed": lambda path: path.write_text(path.read_text().replace("[1,2,3,4]", "[1,2,3,5]")),
    "an answer too short": lambda path: sealed(path, {"answers": [[1, 2, 3]]}),
    "a negative id": lambda path: sealed(path, {"answers": [[1, 2, 3, -4]]}),
    "text": lambda path: sealed(path, {"answers": [["a", "b", "c", "d"]]}),
    "something more": lambda path: sealed(path, {"answers": [], "more": 1}),
    "no answers": lambda path: sealed(path, {}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_set_aside_with_one_line_and_work_goes_on(folder: Path, lines: list[str], damage: str) -> None:
    path = write(folder, lines, ONE)
    DAMAGE[damage](path)
    assert answers_of(folder, lines).load() == []
    assert len(lines) == 1 and str(path) in lines[0] and "set aside" in lines[0]
    assert [p for p in path.parent.iterdir() if p.name.startswith("answers.json.damaged-")]
    write(folder, lines, TWO)
    assert answers_of(folder, lines).load() == [TWO] and len(lines) == 1


@pytest.mark.parametrize("name", ["target", "tokenizer"])
def test_answers_of_another_target_are_not_used(folder: Path, lines: list[str], name: str) -> None:
    write(folder, lines, ONE)
    assert answers_of(folder, lines, **{name: "c" * 64}).load() == []
    assert len(lines) == 1 and f"{name} differs" in lines[0]


def test_forgotten_answers_stay_forgotten(folder: Path, lines: list[str]) -> None:
    path = write(folder, lines, ONE)
    running = answers_of(folder, lines)
    running.add(TWO)
    running.save()
    path.with_name("answers.json.damaged-1").write_text("set aside before")
    State(folder, lines.append).forget()
    assert {entry.name for entry in folder.iterdir()} == {MARKER, LOCK}
    running.save()
    assert running.load() == [] and not path.exists()
    running.add(THREE)  # what is said from now on is kept
    running.save()
    assert running.load() == [THREE] and lines == []


def test_without_a_state_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = answers_of(None, lines)
    kept.add(ONE)
    kept.save()
    assert kept.path is None and kept.load() == [] and list(tmp_path.iterdir()) == [] and lines == []
