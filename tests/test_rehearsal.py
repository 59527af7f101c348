"""What the head learns from: rehearsed rounds are the rounds that were, and labels are what the draw gives."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import NOWHERE, Loaded

from omnidraft.adapters.head import gradient
from omnidraft.adapters.rehearsal import Rehearsal, Rehearsed, label, relearn
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.runtime.adapter_file import load_adapter
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.features import FEATURES, describe, logit
from omnidraft.runtime.noise import gumbel
from omnidraft.runtime.options import Options
from omnidraft.runtime.outlook import Outlook
from omnidraft.runtime.translation import Kind, Mode

P = {3: 0.5, 8: 0.3, 9: 0.15}  # 0.05 is not among the likeliest
Q = {3: 0.6, 8: 0.1, 20: 0.2}


def top(p: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    ids, values = np.zeros(16, np.int32), np.zeros(16, np.float16)
    ids[: len(p)], values[: len(p)] = list(p), list(p.values())
    return ids, values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_labels_are_the_acceptance_that_the_coupled_draw_has(temperature: float) -> None:
    """By drawing 20 000 times from both laws with the same noise."""
    weights = {t: p ** (1 / temperature) for t, p in {**P, 30: 0.05}.items()}
    p_ids, q_ids = np.array(sorted(weights)), np.array(sorted(Q))
    p_log, q_log = np.log([weights[t] for t in p_ids.tolist()]), np.log([Q[t] for t in q_ids.tolist()])
    seen: dict[int, list[bool]] = {t: [] for t in Q}
    for position in range(20_000):
        y = int(p_ids[np.argmax(p_log + gumbel(1, position, p_ids))])
        x = int(q_ids[np.argmax(q_log + gumbel(1, position, q_ids))])
        seen[x].append(x == y)
    for token, outcomes in seen.items():
        assert label(*top(P), Q, token, temperature) == pytest.approx(np.mean(outcomes), abs=0.02), token


def test_greedy_labels_say_whether_the_target_would_say_it() -> None:
    assert label(*top(P), Q, 3, 0) == 1
    assert label(*top(P), Q, 8, 0) == 0
    assert label(*top({}), Q, 8, 0) == 0
    assert label(*top(P), {5: 1.0}, 5, 1.0) == 0, "not among the likeliest"
    assert label(*top({3: 1.0}), {3: 1.0}, 3, 1.0) == pytest.approx(1)


def test_features_are_what_they_are_called() -> None:
    masses = {1: 0.4, 2: 0.1, 3: 0.0}
    found = dict(zip(FEATURES, describe(masses, 0.5, 1, Kind.MERGE, 0, 4, 0.7).tolist(), strict=True))
    assert found["logit"] == pytest.approx(logit(0.8), abs=1e-5)
    assert found["margin"] == pytest.approx(0.6)
    assert found["entropy"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.2)))
    assert (found["merge"], found["split"], found["piece"]) == (1, 0, 0)
    assert (found["coverage"], found["index"], found["temperature"]) == pytest.approx((0.5, 0.5, 0.7))
    assert describe(masses, 0.5, 9, Kind.SPLIT, 1, 0, 0)[FEATURES.index("piece")] == 1
    assert np.isfinite(describe({}, 0, 9, Kind.DIRECT, 0, 99, 0)).all()
    assert (logit(0), logit(1)) == (-7, 7)


@pytest.fixture(scope="module")
def heard(loaded: dict[str, Loaded]) -> tuple[Sample, list[bool]]:
    """A finished greedy answer as a sample, with the outcome of each proposal that the target decided."""
    pair = loaded["int8"]
    engine = Engine(pair.pair, Options("threshold:0.9999999", mode=Mode.STATIC), NOWHERE, pair.calibration)
    engine.observing = True
    report = engine.generate("Who wrote Hamlet?", max_new_tokens=120)
    assert report.finish_reason == "stop" and engine.observation is not None
    return next(Spelling.of(pair.pair).samples(engine.observation)), [accepted for _, accepted in report.predictions]


def test_a_rehearsal_goes_through_the_very_rounds_that_decoding_did(
    loaded: dict[str, Loaded], heard: tuple[Sample, list[bool]]
) -> None:
    sample, outcomes = heard
    seen = Rehearsal(loaded["int8"].pair).run(sample, 0.0)
    assert [label == 1 for label in seen.labels.tolist()] == outcomes
    assert {True, False} == set(outcomes), "the check is vacuous"


def test_rehearsals_are_deterministic_and_labels_are_probabilities(
    loaded: dict[str, Loaded], heard: tuple[Sample, list[bool]]
) -> None:
    rehearsal = Rehearsal(loaded["int8"].pair)
    first, second = (rehearsal.run(heard[0], 0.7, seed=5) for _ in range(2))
    assert np.array_equal(first.hidden, second.hidden) and np.array_equal(first.labels, second.labels)
    assert ((first.labels >= 0) & (first.labels <= 1)).all()
    assert set(first.labels.tolist()) - {0.0, 1.0}, "soft labels"
    assert first.hidden.shape == (len(first.labels), 256) and first.features.shape == (len(first.labels), len(FEATURES))


def test_a_head_relearns_what_changed(loaded: dict[str, Loaded], heard: tuple[Sample, list[bool]]) -> None:
    """With an adapter of noise nothing is accepted any more; the head of before does not know, the new one does."""
    pair = loaded["int8"].pair
    assert pair.drafter is not None and pair.drafter.info.head is not None
    head = load_adapter(pair.bundle.path / pair.drafter.info.head["weights"])
    decoder, rng = pair.drafter.decoder, np.random.default_rng(0)
    sizes = pair.drafter.info.lora["projections"] if pair.drafter.info.lora else {}
    noise = {f"{n}.lora_A": rng.standard_normal((r, 4)).astype(np.float32) / 4 for n, (r, _) in sizes.items()}
    noise |= {f"{n}.lora_B": rng.standard_normal((4, c)).astype(np.float32) / 4 for n, (_, c) in sizes.items()}
    decoder.set_adapter(noise)
    try:
        seen = Rehearsed.of(Rehearsal(pair).run(heard[0], t) for t in (0.0, 0.7))
        learned = relearn(pair, head, [heard[0]] * 8)
    finally:
        decoder.set_adapter(None)

    def loss(parameters: dict[str, np.ndarray]) -> float:
        return gradient(parameters, seen.hidden, seen.features, seen.labels)[0]

    assert loss(learned) < 0.9 * loss(head)


def test_the_outlook_follows_what_happens() -> None:
    """Without a head it believes q̂; a hundred outcomes that say otherwise move it."""
    outlook = Outlook(None)
    features = np.zeros(len(FEATURES), np.float32)
    assert outlook.expect(None, features) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    for _ in range(400):
        outlook.observe(outlook.expect(None, features), bool(rng.random() < 0.8))
    assert outlook.expect(None, features) == pytest.approx(0.8, abs=0.08)
