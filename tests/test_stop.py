"""The stop machine shows exactly the text up to the first stop string, however tokens cut it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.stop import StopMachine

EOS, SPECIAL = 256, 257
BYTES: list[bytes | None] = [bytes([b]) for b in range(256)] + [None, None]


def naive(data: bytes, stops: Sequence[str]) -> tuple[str, str | None]:
    """The whole text, cut at the stop string that is completed first (the longest, if several are)."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(machine: StopMachine, tokens: Sequence[int]) -> list[str]:
    shown = []
    for token in tokens:
        shown.append(machine.push(token))
        if machine.finish_reason is not None:
            break
    return [*shown, machine.finish()]


def cut(data: bytes, cuts: set[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


few = st.one_of(st.text("ab\n🙂é\ufffd", min_size=1, max_size=5), st.text("ab", min_size=1, max_size=8))
data = st.lists(
    st.one_of(few.map(str.encode), st.sampled_from([b"\xf0", b"\x9f\x99", b"\x82", b"\xff"]), st.binary(max_size=3)),
    max_size=10,
).map(b"".join)


@given(data, st.lists(few, max_size=4), st.sets(st.integers(0, 60)))
@example("a🙂b".encode(), [], {2, 3, 4})
@example(b"aaaab", ["aaab", "aab"], {1, 2, 3})
@example(b"a\xf0\x9f", ["\ufffd"], {1, 2})
@example(b"aabaaabaaaa", ["aabaaaa"], {4, 8})
@example(b"abcabd", ["abd", "bcx", "cab"], set())
def test_the_text_is_the_naive_one_for_any_cut(data: bytes, stops: list[str], cuts: set[int]) -> None:
    table: list[bytes | None] = [*cut(data, cuts)]
    machine = StopMachine({len(table)}, stops, 1000, table)
    text = "".join(run(machine, range(len(table) + 1)))  # the last id is eos
    expected, match = naive(data, stops)
    assert text == expected
    assert (machine.finish_reason, machine.stop_match) == ("stop", match or len(table))


@given(data, st.lists(few, max_size=4))
def test_nothing_that_may_belong_to_a_stop_string_is_shown_and_no_more_is_held(data: bytes, stops: list[str]) -> None:
    machine = StopMachine((), stops, 10**6, BYTES)
    shown = ""
    for index, byte in enumerate(data):
        shown += machine.push(byte)
        if machine.finish_reason is not None:
            break
        # All that could still change: the longest end that some stop string begins with.
        whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data[: index + 1])  # no half character
        held = max((n for n in range(len(whole) + 1) for s in stops if n < len(s) and whole.endswith(s[:n])), default=0)
        assert shown == whole[: len(whole) - held]


def test_an_emoji_over_four_tokens_is_shown_whole() -> None:
    machine = StopMachine((), (), 10, BYTES)
    assert [machine.push(b) for b in "🙂".encode()] == ["", "", "", "🙂"]


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    machine = StopMachine((), (), 3, BYTES)
    assert [machine.push(b) for b in "🙂".encode()[:3]] == ["", "", "\ufffd"]
    assert machine.finish_reason == "length"


def test_special_tokens_and_ids_past_the_table_show_nothing_and_count() -> None:
    machine = StopMachine((EOS,), (), 10, BYTES)
    assert run(machine, [97, SPECIAL, 99_999, 98, EOS]) == ["a", "", "", "b", "", ""]
    assert machine.completion_tokens == 5
    assert machine.stop_match == EOS


def test_a_stop_string_cuts_inside_a_token_and_drops_the_rest() -> None:
    machine = StopMachine((), ["STOP"], 10, [b"one ST", b"OP two"])
    assert [machine.push(0), machine.push(1)] == ["one ", ""]
    assert (machine.finish_reason, machine.stop_match, machine.completion_tokens) == ("stop", "STOP", 2)
    assert machine.finish() == ""


def test_text_held_in_vain_is_shown() -> None:
    machine = StopMachine((), ["STOP"], 10, [b"ST", b"AY", b"S"])
    assert [machine.push(0), machine.push(1), machine.push(2)] == ["", "STAY", ""]
    assert machine.finish() == "S" and machine.finish() == ""
    assert machine.finish_reason is None  # interrupted, not finished by itself


def test_the_budget_counts_emitted_tokens_and_a_stop_at_its_end_is_a_stop() -> None:
    machine = StopMachine((EOS,), ["zz"], 2, BYTES)
    assert run(machine, [97, 98, 99]) == ["a", "b", ""]
    assert (machine.finish_reason, machine.stop_match, machine.completion_tokens) == ("length", None, 2)
    for last in (EOS, 122):
        machine = StopMachine((EOS,), ["zz"], 2, BYTES)
        run(machine, [122, last])
        assert machine.finish_reason == "stop"


@pytest.mark.parametrize("tokens", [[EOS], [97] * 3, [122, 122]])
def test_a_finished_machine_takes_nothing_more(tokens: list[int]) -> None:
    machine = StopMachine((EOS,), ["zz"], 3, BYTES)
    run(machine, tokens)
    with pytest.raises(RuntimeError):
        machine.push(97)


def test_bad_options_are_refused() -> None:
    with pytest.raises(OmniDraftError, match="stop string"):
        StopMachine((), ["a", ""], 1, BYTES)
    with pytest.raises(OmniDraftError, match="at least 1"):
        StopMachine((), [], 0, BYTES)


def test_a_stop_token_with_text_of_its_own_is_not_shown() -> None:
    """Some checkpoints end with a token that their tokenizer does not mark as special."""
    machine = StopMachine([1], [], 10, [b"a", b"</eos>"])
    assert machine.push(0) + machine.push(1) == "a"
    assert machine.finish_reason == "stop"
