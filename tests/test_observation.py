"""What the engine keeps of a response for those who learn: the target's own words and laws, and nothing else."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from conftest import Loaded

from omnidraft.runtime.decoder import prefill
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.invariance import CHUNK
from omnidraft.runtime.observation import LOG_FLOOR, TOP, Observation, likeliest
from omnidraft.runtime.sampling import Sampling

QUESTION = "How many legs do three cats have? Explain."
STORY = "Tell me a very long story about three cats and their legs."
LENGTH = 40


@pytest.fixture(scope="module")
def engine(loaded: dict[str, Loaded]) -> Engine:
    engine = loaded["int8"].engine("4")
    engine.observing = True
    return engine


def observed(engine: Engine) -> Observation:
    assert engine.observation is not None and engine.report is not None
    assert engine.observation.tokens == engine.report.tokens
    assert len(engine.observation.tops) == len(engine.report.tokens)
    return engine.observation


def plain_logits(engine: Engine, prompt: str, tokens: list[int]) -> np.ndarray:
    """Logits [n, V] before each token of a response that is put behind its prompt, in passes of W₀ rows."""
    ids, _, _ = engine.encode(prompt, len(tokens))
    decoder, least = engine.pair.target.decoder, engine.calibration.w0 or 1
    decoder.owner = None
    decoder.reserve(len(ids) + len(tokens) + least)
    decoder.rollback(0)
    rows = [prefill(decoder, ids, CHUNK, least)]
    for token in tokens[:-1]:
        rows.append(decoder.run([token] * least)[0].copy())
        decoder.rollback(decoder.length - least + 1)
    return np.array(rows)


SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.7, top-p": Sampling(0.7, top_p=0.9, seed=3),
    "temperature 0.7, penalty": Sampling(0.7, repetition_penalty=1.3, seed=4),
    "greedy, penalty": Sampling(repetition_penalty=1.2),
}


@pytest.mark.model
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_what_is_kept_is_the_targets_own_law_at_temperature_1(engine: Engine, sampling: Sampling) -> None:
    """Bit for bit that of a plain pass, whatever was drafted and however the tokens were drawn from it."""
    report = engine.generate(STORY, sampling=sampling, max_new_tokens=LENGTH)
    assert report.counts["accepted"] > 3, "rounds of one token would be trivial"
    kept = observed(engine).tops
    logits = plain_logits(engine, STORY, report.tokens)
    for (ids, p), row in zip(kept, logits, strict=True):
        wanted_ids, wanted_p = likeliest(row)
        assert np.array_equal(ids, wanted_ids) and np.array_equal(p, wanted_p)
        exact = np.exp(row.astype(np.float64) - row.max())
        exact /= exact.sum()
        assert np.allclose(p, exact[ids], rtol=1e-4)
        assert 1 <= len(ids) <= TOP and exact[ids].min() >= np.delete(exact, ids).max()
    penalised = sampling.repetition_penalty > 1
    likely = [int(ids[p.argmax()]) for ids, p in kept]
    assert (likely != report.tokens) == (sampling.temperature > 0 or penalised), "the draw is another thing"


@pytest.mark.model
def test_nothing_is_kept_unless_somebody_watches(loaded: dict[str, Loaded]) -> None:
    engine = loaded["int8"].engine("4")
    engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=8)
    assert engine.observation is None
    engine.observing = True
    engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=8)
    first = observed(engine)
    engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=8)
    assert observed(engine) is not first and observed(engine).tokens == first.tokens, "each response has its own"
    engine.observing = False
    engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=8)
    assert engine.observation is None


@pytest.mark.model
def test_a_stop_inside_a_round_leaves_nothing_behind_it(engine: Engine) -> None:
    """Stop strings that end with a proposal behind which another would have been accepted."""
    chunks = list(engine.stream(STORY, Sampling(), LENGTH))
    whole = observed(engine)
    inside = [i for i, (this, after) in enumerate(pairwise(chunks)) if this.from_draft and after.from_draft]
    stopped = []
    for i in inside[-4:]:
        stop = "".join(chunk.text for chunk in chunks[: i + 1])[-12:]
        engine.generate(STORY, sampling=Sampling(), max_new_tokens=LENGTH, stop=[stop])
        kept = observed(engine)
        assert kept.tokens == whole.tokens[: len(kept.tokens)]
        assert all(np.array_equal(a[1], b[1]) for a, b in zip(kept.tops, whole.tops, strict=False))
        stopped.append(len(kept.tokens) - 1)
    assert len(set(stopped) & set(inside)) > 1, "the round would have gone on"


@pytest.mark.model
def test_a_cancelled_stream_leaves_what_was_emitted(engine: Engine) -> None:
    with closing(engine.stream(QUESTION, Sampling(), LENGTH)) as stream:
        for _ in range(7):
            next(stream)
    assert 7 <= len(observed(engine).tokens) < LENGTH


@pytest.mark.model
def test_the_prompt_is_kept_as_the_drafter_read_it(engine: Engine) -> None:
    for raw in (False, True):
        engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=4, raw=raw)
        _, prefix, text = engine.encode(QUESTION, 4, raw)
        assert (observed(engine).prefix, observed(engine).text) == (prefix, text)
        assert bool(text) == raw


def test_the_likeliest_are_the_heaviest_that_matter() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.1, 1.0, 10.0, 100.0):
        logits = (rng.normal(size=500) * spread).astype(np.float32)
        ids, p = likeliest(logits)
        exact = np.exp(logits.astype(float) - logits.max())
        order = np.argsort(-logits)[:TOP]
        assert set(ids.tolist()) == {i for i in order.tolist() if logits[i] > logits.max() + LOG_FLOOR}
        assert np.allclose(p, exact[ids] / exact.sum(), rtol=1e-5) and p.dtype == np.float32
