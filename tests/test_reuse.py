"""Rows that a response left behind stand for the beginning of the next prompt, and change nothing of what is said."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from conftest import NOWHERE, PRECISIONS, Loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnidraft.runtime.causal_model import held
from omnidraft.runtime.decoder import Decoder, prefill
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.invariance import CHUNK, chunks_agree
from omnidraft.runtime.options import Options
from omnidraft.runtime.report import Report
from omnidraft.runtime.sampling import Sampling

pytestmark = pytest.mark.model
LENGTH = 24
QUESTION = "A farmer has 17 sheep and buys 5 more. How many sheep are there?"
GREEDY = Sampling()


def follow_up(answer: str, question: str = "Explain that to a child.") -> list[dict[str, str]]:
    said = (("user", QUESTION), ("assistant", answer), ("user", question))
    return [{"role": role, "content": content} for role, content in said]


def ask(engine: Engine, messages: list[dict[str, str]] | str, sampling: Sampling = GREEDY) -> Report:
    return engine.generate(messages, sampling=sampling, max_new_tokens=LENGTH)


def anew(engine: Engine, messages: list[dict[str, str]] | str, sampling: Sampling = GREEDY) -> Report:
    engine.forget()
    report = ask(engine, messages, sampling)
    assert report.reused_tokens == 0
    return report


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("draft", ["off", "4", "cost"])
def test_a_second_turn_says_what_it_says_when_all_is_read_anew(
    loaded: dict[str, Loaded], precision: str, draft: str
) -> None:
    engine = loaded[precision].engine(draft)
    first = anew(engine, QUESTION)
    messages = follow_up(first.text)
    for sampling in (GREEDY, Sampling(0.8, seed=5)):
        anew(engine, QUESTION)
        second = ask(engine, messages, sampling)
        assert first.prompt_tokens < second.reused_tokens < second.prompt_tokens, "question and answer were read"
        again = anew(engine, messages, sampling)
        assert (second.tokens, second.text) == (again.tokens, again.text)


def test_the_same_prompt_again_is_read_but_for_its_end(loaded: dict[str, Loaded]) -> None:
    engine = loaded["int8"].engine("off")
    first = anew(engine, QUESTION)
    again = ask(engine, QUESTION)
    assert again.tokens == first.tokens
    assert again.reused_tokens == first.prompt_tokens - (loaded["int8"].w0 or 1), "the last pass has W₀ rows"


def test_the_drafter_keeps_its_rows_too(loaded: dict[str, Loaded]) -> None:
    engine = loaded["int8"].engine("4")
    first = anew(engine, QUESTION)
    assert engine.pair.drafter is not None
    decoder = engine.pair.drafter.decoder
    prefix = engine.encode(follow_up(first.text), LENGTH)[1]
    kept, runs = held(decoder, prefix), []
    run = decoder.run
    decoder.run = lambda ids: (runs.append(len(ids)), run(ids))[1]  # type: ignore[method-assign]
    try:
        ask(engine, follow_up(first.text))
    finally:
        del decoder.run  # type: ignore[attr-defined]
    assert kept > len(engine.encode(QUESTION, LENGTH)[1]) // 2
    assert runs[0] == len(prefix) - kept


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stream_that_was_left_is_no_trap(loaded: dict[str, Loaded], cut: int) -> None:
    """What a round had proposed beyond the cut is not taken for what was said."""
    engine = loaded["int8"].engine("4")
    expected = anew(engine, follow_up("Twenty-two, I think. Let me count again."))
    engine.forget()
    with closing(engine.stream(QUESTION, GREEDY, LENGTH)) as stream:
        for _ in range(cut):
            next(stream)
    got = ask(engine, follow_up("Twenty-two, I think. Let me count again."))
    assert got.tokens == expected.tokens and got.reused_tokens > 0


def test_other_conversations_between_change_nothing(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    engine = loaded["int4"].engine("2")
    expected = [anew(engine, prompt).tokens for prompt in prompts[:3]]
    engine.forget()
    for _ in range(2):
        assert [ask(engine, prompt).tokens for prompt in prompts[:3]] == expected


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_measured_whether_chunks_agree_with_rounds(loaded: dict[str, Loaded], precision: str) -> None:
    decoder, w0 = loaded[precision].pair.target.decoder, loaded[precision].w0
    assert w0 is not None and chunks_agree(decoder, 8192, w0)
    assert loaded[precision].calibration.reuse
    assert not chunks_agree(decoder, 40, w0), "too few positions to tell"
    if precision == "int4":
        assert not chunks_agree(decoder, 8192, 1), "one-row passes take other kernels: the control"


@pytest.mark.parametrize(("rows", "widths"), [(64, ()), (17, ()), (9, (9,)), (33, (33,))])
def test_one_kind_of_pass_that_differs_is_enough(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch, rows: int, widths: tuple[int, ...]
) -> None:
    """The end of a prompt may take any graph, so each is asked."""
    decoder = loaded["int8"].pair.target.decoder
    monkeypatch.setattr(decoder, "widths", widths, raising=False)
    assert chunks_agree(decoder, 8192, 2)
    run = decoder.run
    monkeypatch.setattr(decoder, "run", lambda ids: run(ids) + np.float32(1e-3 if len(ids) == rows else 0))
    assert not chunks_agree(decoder, 8192, 2)


def test_where_chunks_do_not_agree_all_is_read_anew(loaded: dict[str, Loaded]) -> None:
    calibration = replace(loaded["int8"].calibration, reuse=False)
    engine = Engine(loaded["int8"].pair, Options("2"), NOWHERE, calibration)
    first = ask(engine, QUESTION)
    assert ask(engine, QUESTION).reused_tokens == first.reused_tokens == 0
    near = Engine(loaded["int8"].pair, Options("2", lossless="near"), NOWHERE, calibration)
    ask(near, QUESTION)
    assert ask(near, QUESTION).reused_tokens > 0, "near makes no promise that re-reading could keep"


def test_rows_that_are_not_those_of_the_prompt_change_the_text(loaded: dict[str, Loaded]) -> None:
    """The control: if reading anew happened after all, a lie about what the rows are would do no harm."""
    engine = loaded["fp32"].engine("off")
    expected = anew(engine, QUESTION)
    ask(engine, "Name three rivers that flow into the Black Sea, and the countries that they cross on their way.")
    decoder = engine.pair.target.decoder
    decoder.fed[:] = engine.encode(QUESTION, LENGTH)[0]
    got = ask(engine, QUESTION)
    assert got.reused_tokens > 20 and got.tokens != expected.tokens
    engine.forget()


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_passes_leaves_rows_as_a_prefill_would(loaded: dict[str, Loaded], data: st.DataObject) -> None:
    """Rounds of any widths with proposals that are rolled back, then a prompt that goes on from some of it."""
    precision = data.draw(st.sampled_from(PRECISIONS))
    decoder, w0 = loaded[precision].pair.target.decoder, loaded[precision].w0 or 2
    ids = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, decoder.vocabulary, 150).tolist()
    decoder.reserve(256)
    decoder.rollback(0)
    prefill(decoder, ids[: data.draw(st.integers(1, 80))], CHUNK, w0)
    for width in data.draw(st.lists(st.integers(1, 17), max_size=4)):
        begin = decoder.length
        decoder.run([*ids[begin : begin + width], *[7] * data.draw(st.integers(max(0, w0 - width), 4))])
        decoder.rollback(begin + data.draw(st.integers(0, width)))
    length = data.draw(st.integers(decoder.length + w0, 150))
    assert held(decoder, ids) == decoder.length
    reused = [prefill(decoder, ids[:length], CHUNK, w0), decoder.run(ids[:w0]).copy()]
    decoder.rollback(0)
    fresh = [prefill(decoder, ids[:length], CHUNK, w0), decoder.run(ids[:w0]).copy()]
    assert all(np.array_equal(a, b) for a, b in zip(reused, fresh, strict=True))


def test_a_buffer_that_grows_keeps_its_rows(loaded: dict[str, Loaded]) -> None:
    bundle = loaded["int8"].pair.bundle
    decoder = Decoder(bundle.path / bundle.graph("smollm2", "int8").model)
    ids = list(range(100, 140))
    decoder.run(ids)
    expected = decoder.run([5, 6, 7]).copy()
    decoder.rollback(40)
    decoder.reserve(decoder.capacity + 1)
    assert decoder.length == 40 and decoder.fed[:40] == ids
    assert np.array_equal(decoder.run([5, 6, 7]), expected)
