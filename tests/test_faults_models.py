"""ONNX Runtime that fails: the answer is complete, or ends with one clear line; and the next one is whole.

The text never needs the drafter, so a drafter that fails costs speed and one line. A target that fails ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import NOWHERE
from faults import INJECTED, failing_passes, failing_sessions
from registry import BOTH, LEARNED, Models, target_name

from omnidraft.adapters.learner import Learner
from omnidraft.adapters.settings import Settings
from omnidraft.runtime.answers import Answers
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.report import Report
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State

pytest.importorskip("torch")
PROMPT, OTHER, LENGTH = "The boat came back", "A train travels", 9
POLICIES = ("1", "4", "threshold", "cost")
ALWAYS = 1_000_000
Lines = list[str]


@pytest.fixture(scope="module")
def pair(toy_models: Models) -> Pair:
    return load_pair(toy_models.bundle, target_name(LEARNED), threads=1)


@pytest.fixture(scope="module")
def calibration(pair: Pair) -> Calibration:
    return calibrate(pair, NOWHERE)


@pytest.fixture
def plain(pair: Pair, calibration: Calibration) -> Callable[..., Report]:
    off = Engine(pair, Options("off"), NOWHERE, calibration)
    return lambda prompt, sampling: off.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)


def ask(engine: Engine, prompt: str, sampling: Sampling) -> Report:
    return engine.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)


def drafter_faults(
    pair: Pair,
    calibration: Calibration,
    plain: Callable[..., Report],
    draft: str,
    part: Callable[[Pair], Any],
    count: int,
) -> int:
    """At how many passes of `part` a fault was survived: `count` passes fail, from each one on in turn."""
    survived = 0
    for sampling in BOTH:
        expected, other = (plain(prompt, sampling).tokens for prompt in (PROMPT, OTHER))
        n, struck = 0, True
        while struck:
            n += 1
            lines: Lines = []
            engine = Engine(pair, Options(draft), State(None, lines.append), calibration)
            with failing_passes(part(pair), n, count) as session:
                report = ask(engine, PROMPT, sampling)
                struck = session.passes >= n
            assert report.tokens == expected and report.finish_reason == "length"
            assert (INJECTED in report.drafter_failure) == struck == bool(lines) and "\n" not in report.drafter_failure
            assert all("the target went on alone" in line and INJECTED in line and "\n" not in line for line in lines)
            after = ask(engine, OTHER, sampling)
            assert after.tokens == other and after.drafter_failure == "" and len(lines) == struck
            survived += struck
    return survived


@pytest.mark.parametrize("count", [1, ALWAYS], ids=["once", "lasting"])
@pytest.mark.parametrize("draft", POLICIES)
def test_a_drafter_that_fails_at_any_pass_costs_a_line_and_not_the_answer(
    pair: Pair, calibration: Calibration, plain: Callable[..., Report], draft: str, count: int
) -> None:
    survived = drafter_faults(pair, calibration, plain, draft, lambda p: p.drafter.decoder, count)  # type: ignore
    assert survived > 4, "hardly anything was tried"


def test_a_head_that_fails_is_a_drafter_that_fails(
    pair: Pair, calibration: Calibration, plain: Callable[..., Report]
) -> None:
    assert drafter_faults(pair, calibration, plain, "4", lambda p: p.head, 1) > 4


def test_a_drafter_that_failed_drafts_again_with_the_next_answer(pair: Pair, calibration: Calibration) -> None:
    assert pair.drafter is not None
    engine = Engine(pair, Options("4"), NOWHERE, calibration)
    usual = ask(engine, PROMPT, BOTH[0]).counts
    with failing_passes(pair.drafter.decoder, 1):
        assert ask(engine, PROMPT, BOTH[0]).counts["proposed"] == 0
    again = ask(engine, PROMPT, BOTH[0]).counts
    assert again["accepted"] == usual["accepted"] > 0


@pytest.mark.parametrize("draft", ["off", "4", "cost"])
def test_a_target_that_fails_at_any_pass_ends_the_answer_with_a_line(
    pair: Pair, calibration: Calibration, plain: Callable[..., Report], draft: str, tmp_path: Path
) -> None:
    """What was shown is a beginning of the answer, the state opens as it was before, and the next answer is whole."""
    expected, other = plain(PROMPT, BOTH[0]), plain(OTHER, BOTH[0])
    key: Any = {"target": pair.target.info.weights_sha256, "tokenizer": pair.target.info.tokenizer_sha256}
    path = f"answers/{key['target'][:12]}-{key['tokenizer'][:12]}.json"
    n, struck = 0, True
    while struck:
        n += 1
        engine = Engine(pair, Options(draft), State(tmp_path / str(n), pytest.fail), calibration)
        engine.keep_answers()
        ask(engine, OTHER, BOTH[0])
        shown: list[int] = []
        with failing_passes(pair.target.decoder, n) as session:
            try:
                for chunk in engine.stream(PROMPT, BOTH[0], LENGTH):
                    shown.append(chunk.token)
            except OmniDraftError as error:
                assert INJECTED in str(error) and "\n" not in str(error) and session.passes >= n
            struck = session.passes >= n
        assert shown == expected.tokens[: len(shown)] and (struck or shown == expected.tokens)
        assert engine.report is not None and engine.report.tokens[: len(shown)] == shown
        kept = Answers(State(tmp_path / str(n), pytest.fail), path, key, pair.target.decoder.vocabulary).load()
        assert other.tokens in kept
        assert ask(engine, OTHER, BOTH[0]).tokens == other.tokens
    assert n > 3, "hardly anything was tried"


def test_a_session_that_cannot_be_created_is_one_line(toy_models: Models) -> None:
    """Target, drafter, acceptance head: whichever it is, the line names its file."""
    for n in (1, 2, 3):
        with failing_sessions(n) as asked, pytest.raises(OmniDraftError, match=INJECTED) as caught:
            load_pair(toy_models.bundle, target_name(LEARNED), threads=1)
        assert asked[-1] in str(caught.value) and "\n" not in str(caught.value)
    with failing_sessions(4):
        load_pair(toy_models.bundle, target_name(LEARNED), threads=1)


# Learning


QUICK: dict[str, Any] = {"trainer": "onnx-step", "rank": 4, "batch": 1, "interval": 1, "budget": 100.0}


def _learned(learner: Learner) -> tuple[Any, ...]:
    standing, index = learner._standing, learner.store.index()
    candidate = None if standing.candidate is None else standing.candidate.snapshot.lora.tolist()
    return candidate, standing.rounds, index, learner.version


@pytest.mark.parametrize("fault", ["the step fails", "no session"])
def test_a_trainer_that_fails_is_one_line_and_what_was_learned_before_stays(
    pair: Pair, calibration: Calibration, plain: Callable[..., Report], tmp_path: Path, fault: str
) -> None:
    expected = plain(PROMPT, BOTH[0]).tokens
    state = State(tmp_path, pytest.fail)

    def opened() -> Learner:
        return Learner(Engine(pair, Options("4"), state, calibration), state, Settings(**QUICK), pytest.fail)

    with closing(opened()) as learner:
        for _ in range(3):
            assert ask(learner.engine, PROMPT, BOTH[0]).tokens == expected
            assert learner.after_response() is not None
        before = _learned(learner)
    with closing(opened()) as learner:
        assert _learned(learner) == before
        assert ask(learner.engine, PROMPT, BOTH[0]).tokens == expected
        if fault == "the step fails":
            trainer = learner._open()
            with failing_passes(trainer, 1), pytest.raises(OmniDraftError, match=INJECTED) as caught:
                learner.after_response()
        else:
            with failing_sessions(1), pytest.raises(OmniDraftError, match=INJECTED) as caught:
                learner.after_response()
        assert "\n" not in str(caught.value)
    with closing(opened()) as learner:
        assert _learned(learner)[2:] == before[2:] and np.array_equal(_learned(learner)[0], before[0])
        assert ask(learner.engine, PROMPT, BOTH[0]).tokens == expected
        assert learner.after_response() is not None
    learner.engine.use_adapter(None)
