"""The engine's promises beside losslessness: stops, budgets, reports, state, clear refusals."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import NOWHERE, Loaded

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.translation import Mode

pytestmark = pytest.mark.model
QUESTION = "How many legs do three cats have? Explain."
STORY = "Tell me a very long story about three cats and their legs."
GREEDY = Sampling()


@pytest.fixture(scope="module")
def engine(loaded: dict[str, Loaded]) -> Engine:
    return loaded["int8"].engine("3")


def test_the_model_makes_sense(loaded: dict[str, Loaded]) -> None:
    report = loaded["fp32"].engine("3").generate("What is the capital of France?", sampling=GREEDY, max_new_tokens=40)
    assert "Paris" in report.text
    assert report.finish_reason == "stop"


def test_chunks_are_the_text_and_drafted_tokens_are_marked(engine: Engine) -> None:
    chunks = list(engine.stream(QUESTION, GREEDY, 40))
    report = engine.report
    assert report is not None
    assert "".join(chunk.text for chunk in chunks) == report.text
    assert sum(chunk.from_draft for chunk in chunks) == report.counts["accepted"] > 0
    assert [chunk.token for chunk in chunks] == report.tokens


@pytest.mark.parametrize("budget", [1, 2, 3, 17])
def test_budget_counts_emitted_tokens_only(engine: Engine, budget: int) -> None:
    report = engine.generate(QUESTION, sampling=GREEDY, max_new_tokens=budget)
    assert (report.completion_tokens, report.finish_reason) == (budget, "length")


def test_stop_string_ends_both_ways_alike(loaded: dict[str, Loaded]) -> None:
    whole = loaded["int8"].engine("off").generate(QUESTION, sampling=GREEDY, max_new_tokens=40).text
    stop = whole[20:24]
    texts = {
        loaded["int8"].engine(draft).generate(QUESTION, sampling=GREEDY, max_new_tokens=40, stop=[stop]).text
        for draft in ("off", "1", "4", "8")
    }
    assert texts == {whole[: whole.index(stop)]}


def test_counts_stop_where_the_text_stops(loaded: dict[str, Loaded]) -> None:
    """What was proposed behind a stop is neither text nor count."""
    report = loaded["fp32"].engine("8").generate("What is the capital of France?", sampling=GREEDY, max_new_tokens=40)
    assert report.finish_reason == "stop"
    assert report.counts["emitted"] == report.completion_tokens == len(report.tokens)
    assert report.counts["accepted"] < report.completion_tokens


def test_phases_add_up_to_the_wall_time(engine: Engine) -> None:
    begin = time.perf_counter()
    report = engine.generate(QUESTION, sampling=Sampling(0.7, seed=3), max_new_tokens=40)
    wall = time.perf_counter() - begin
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    # What is outside the clock: encoding the prompt, saving the cache, the report.
    assert report.seconds == pytest.approx(wall, rel=0.02, abs=0.01)
    assert report.phases["draft"] > 0 and report.phases["verify"] > 0 and report.phases["prefill"] > 0


def test_the_consumers_time_is_not_ours(engine: Engine) -> None:
    for i, _ in enumerate(engine.stream(QUESTION, GREEDY, 6)):
        if i == 2:
            time.sleep(0.5)
    assert engine.report is not None
    assert engine.report.seconds - engine.report.time_to_first_token < 0.5


def test_seed_decides_the_text(engine: Engine) -> None:
    texts = [engine.generate(QUESTION, sampling=Sampling(1.0, seed=s), max_new_tokens=16).text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_raw_prompt_is_continued(engine: Engine) -> None:
    report = engine.generate("One, two, three, four, five,", sampling=GREEDY, max_new_tokens=4, raw=True)
    assert report.text.strip().startswith("six")


def test_special_tokens_in_a_prompt_are_text(engine: Engine) -> None:
    plain = engine.generate("Say hi", sampling=GREEDY, max_new_tokens=2).prompt_tokens
    report = engine.generate("Say hi<|im_end|>", sampling=GREEDY, max_new_tokens=2)
    assert report.prompt_tokens > plain + 1


def test_cache_grows_and_survives(loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path) -> None:
    state = State(tmp_path, print)
    for prompt in prompts[:3]:
        loaded["int8"].engine("2", state).generate(prompt, sampling=GREEDY, max_new_tokens=40)
    (file,) = tmp_path.rglob("ngram_cache.json")
    entries = json.loads(file.read_text())["payload"]["entries"]
    assert entries
    pair = loaded["int8"].pair
    assert pair.drafter is not None
    for target, spelling, seen, *_ in entries:
        spelled = b"".join(pair.drafter.tokens.bytes_of[d] or b"" for d in spelling)
        assert spelled == pair.target.tokens.bytes_of[target]
        assert seen >= 0


def test_online_cache_learns_merges_from_cold(loaded: dict[str, Loaded]) -> None:
    """Without the static map, the second answer profits from what the first one showed."""
    pair = loaded["int8"]
    engine = Engine(pair.pair, Options("4", mode=Mode.ONLINE), NOWHERE, pair.calibration)
    first, second = (engine.generate(QUESTION, sampling=GREEDY, max_new_tokens=60) for _ in range(2))
    direct = Engine(pair.pair, Options("4", mode=Mode.DIRECT), NOWHERE, pair.calibration)
    only = direct.generate(QUESTION, sampling=GREEDY, max_new_tokens=60)
    assert first.tokens == second.tokens == only.tokens
    assert only.counts["merges"] == 0
    assert second.counts["accepted"] >= first.counts["accepted"]


def test_cancelled_stream_keeps_what_was_learned(loaded: dict[str, Loaded], tmp_path: Path) -> None:
    engine = loaded["int8"].engine("2", State(tmp_path, print))
    with closing(engine.stream(STORY, GREEDY, 60)) as stream:
        for i, _ in enumerate(stream):
            if i == 30:
                break
    assert engine.report is not None and engine.report.finish_reason == "cancelled"
    assert list(tmp_path.rglob("ngram_cache.json"))
    again = engine.generate(STORY, sampling=GREEDY, max_new_tokens=31)
    assert again.tokens == engine.generate(STORY, sampling=GREEDY, max_new_tokens=31).tokens


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ("", 5, "prompt is empty"),
        ("  \n", 5, "prompt is empty"),
        ("word " * 9000, 5, "shorten the prompt"),
        (QUESTION, 9000, "max-new-tokens to at most"),
        (QUESTION, 0, "at least 1"),
    ],
)
def test_refusals(engine: Engine, prompt: str, budget: int, message: str) -> None:
    with pytest.raises(OmniDraftError, match=message):
        engine.generate(prompt, sampling=GREEDY, max_new_tokens=budget)


def test_the_whole_context_can_be_used(loaded: dict[str, Loaded]) -> None:
    """At the last position there is still room for the pad row."""
    engine = loaded["int4"].engine("8")
    context = engine.pair.target.info.context
    prompt = "word " * (context - 60)
    ids = engine.pair.target.prompts.chat([{"role": "user", "content": prompt}])
    assert len(ids) < context
    with pytest.raises(OmniDraftError, match="at most"):
        engine.generate(prompt, sampling=GREEDY, max_new_tokens=context - len(ids))


@pytest.mark.parametrize(
    "options", [{"draft": "0"}, {"draft": "17"}, {"draft": "fast"}, {"lossless": "yes"}, {"verification": "x"}]
)
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(OmniDraftError, match=next(iter(options))):
        Options(**options)  # type: ignore[arg-type]


def test_paper_rule_is_greedy_lossless_too(loaded: dict[str, Loaded]) -> None:
    plain = loaded["int8"].engine("off").generate(QUESTION, sampling=GREEDY, max_new_tokens=30)
    paper = loaded["int8"].engine("4", verification="paper").generate(QUESTION, sampling=GREEDY, max_new_tokens=30)
    assert paper.tokens == plain.tokens
    assert paper.counts["accepted"] > 0


def test_targets_of_equal_weights_and_other_tokenizers_keep_their_answers_apart(
    loaded: dict[str, Loaded], tmp_path: Path
) -> None:
    one = loaded["int8"].pair
    info = replace(one.target.info, tokenizer_sha256="0" * 64)
    for pair in (one, replace(one, target=replace(one.target, info=info))):
        engine = Engine(pair, Options("off"), State(tmp_path, pytest.fail), loaded["int8"].calibration)
        engine.keep_answers()
        engine.generate("Hello", sampling=GREEDY, max_new_tokens=4)
    assert len(list((tmp_path / "answers").glob("*.json"))) == 2
