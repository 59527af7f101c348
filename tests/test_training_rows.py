"""Training text: what is read, what is refused with its line number, and what is never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.runtime.chat import ChatTemplate, encode_prompt
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.tools.training.command import _split
from omnidraft.tools.training.rows import (
    HELD_OUT,
    Row,
    append_rows,
    drop_torn_line,
    is_held_out,
    read_prompts,
    read_rows,
)
from omnidraft.tools.training.tokenizer import DIALECTS, encode_rows, train_tokenizer


def row(number: int, prompt: str = "a", temperature: float | None = 0.0) -> Row:
    return Row(f"r-{number}", "task", prompt, f"answer {number}", temperature, True)


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    good = [
        {"prompt": "p", "response": "r", "temperature": 0.7, "finished": False},
        {"prompt": "p", "reference": "r", "id": "x"},
    ]
    lines = [
        json.dumps(good[0]),
        "{",
        "[1]",
        '{"prompt": "p"}',
        '{"prompt": 1, "response": "r"}',
        "",
        json.dumps(good[1]),
    ]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    rows, complaints = read_rows([path])
    assert [complaint.split(": ")[0] for complaint in complaints] == [f"{path}:{n}" for n in (2, 3, 4, 5, 6, 8)]
    assert [(r.id, r.temperature, r.finished) for r in rows] == [("text-1", 0.7, False), ("x", None, True)]


def test_prompts_need_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one", "task": "t"}\n{"prompt": " "}\n{"id": 3, "prompt": "two"}\n')
    prompts, complaints = read_prompts([path])
    assert [(p.id, p.task, p.prompt) for p in prompts] == [("p-1", "t", "one"), ("3", "text", "two")]
    assert len(complaints) == 1 and f"{path}:2" in complaints[0]
    with pytest.raises(OmniDraftError, match=r"none\.jsonl: cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    append_rows(path, [row(1)])
    append_rows(path, [row(2, 'é "\n', 0.7)])
    assert read_rows([path]) == ([row(1), row(2, 'é "\n', 0.7)], [])


@given(st.integers(0, 400))
def test_a_kill_at_any_byte_loses_the_last_line_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "text.jsonl"
    append_rows(path, [row(n) for n in range(3)])
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    assert drop_torn_line(path) == (not content.endswith(b"\n") and content != b"")
    rows, complaints = read_rows([path])
    assert rows == [row(n) for n in range(content.count(b"\n"))] and complaints == []


def test_no_held_out_prompt_is_trained_on() -> None:
    rows = [row(n, f"prompt {n % 400}", (0.0, 0.7, None)[n % 3]) for n in range(1200)]
    training, held = _split(rows)
    assert not {r.prompt for r in training} & {r.prompt for r in held}
    assert all(r.temperature == 0 for r in held)
    assert 200 / HELD_OUT < len({r.prompt for r in held}) < 800 / HELD_OUT
    more, held_later = _split(rows + [row(n, f"prompt {n}") for n in range(400, 800)])
    assert set(held) <= set(held_later) and set(training) <= set(more), "more text moves nothing across"


def test_white_space_around_a_prompt_changes_no_side() -> None:
    assert all(is_held_out(f"prompt {n}") == is_held_out(f" prompt {n}\n") for n in range(200))


@pytest.mark.parametrize("family", DIALECTS)
def test_digits_stand_alone_and_special_tokens_in_text_stay_text(family: str, tmp_path: Path) -> None:
    path, dialect = tmp_path / "tokenizer.json", DIALECTS[family]
    train_tokenizer(["There are 1234 and 1234 and 12 cats."] * 20, 400, path, dialect)
    tokens = TokenBytes.from_file(path)
    assert [tokens.bytes_of[i] for i in tokens.encode(b"1234")] == [b"1", b"2", b"3", b"4"]
    assert any(len(piece or b"") > 3 for piece in tokens.bytes_of), "the check is vacuous"
    stop = dialect.special[0]
    prompts, answers = encode_rows([Row("1", "t", f"a {stop} b", "c", 0.0, False), row(2, "a b")], tokens)
    assert len(prompts[0]) > len(prompts[1]) + 2, "no special token came out of the text"
    end = tokens.special[stop]
    assert end == 0, "the configuration names id 0 as the end"
    assert end not in answers[0] and answers[1][-1] == end, "only a finished answer ends"


@pytest.mark.parametrize("family", DIALECTS)
def test_training_spells_a_conversation_as_the_chat_template_does(family: str, tmp_path: Path) -> None:
    dialect = DIALECTS[family]
    train_tokenizer(["What are cats?", "Cats are cats."] * 20, 400, tmp_path / "tokenizer.json", dialect)
    tokens = TokenBytes.from_file(tmp_path / "tokenizer.json")
    template = ChatTemplate(dialect.template, {}, family)
    parts = encode_prompt(template, [{"role": "user", "content": "What are cats?"}], tokens.special)
    prompts, _ = encode_rows([Row("1", "t", "What are cats?", "Cats.", 0.0, True)], tokens)
    assert tokens.encode_prompt(parts) == prompts[0]
