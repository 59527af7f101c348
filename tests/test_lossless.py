"""Text with drafting equals text without, token for token, on the real model at every precision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import NOWHERE, PRECISIONS, Loaded

from omnidraft.export.llama_graph import build_graph, read_shape
from omnidraft.models import registry
from omnidraft.runtime.decoder import Decoder, prefill
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State

pytestmark = pytest.mark.model
LENGTH = 28
LONG_WORDS = "Explain photosynthesis, chlorophyll and evapotranspiration to a botanist."


@pytest.mark.parametrize("precision", PRECISIONS)
def test_drafted_text_equals_plain_text(
    loaded: dict[str, Loaded], prompts: list[str], precision: str, tmp_path: Path
) -> None:
    """Over all prompts and policies, greedy and sampled, while cache and earlier answers go from empty to full."""
    pair = loaded[precision]
    assert pair.w0 is not None
    plain = pair.engine("off")
    cost = pair.engine("cost", State(tmp_path / "cost", print))
    cost.keep_answers()
    others = ("1", "2", "3", "threshold", "4", "5", "threshold:0.2", "8")
    drafted = [pair.engine(draft, State(tmp_path / draft.replace(":", "-"), print)) for draft in others]
    proposed = accepted = looked_up = 0
    for i, prompt in enumerate(prompts):
        sampling = Sampling() if i % 2 else Sampling(0.7, top_p=0.95, repetition_penalty=1.1 if i % 3 else 1.0, seed=i)
        expected = plain.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
        for engine in (cost, drafted[i % 8]):
            got = engine.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
            assert got.tokens == expected.tokens, (prompt, engine.options)
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            proposed, accepted = proposed + got.counts["proposed"], accepted + got.counts["accepted"]
            looked_up += got.counts["lookups"]
    assert proposed > 300 and accepted > 30 and looked_up > 0, "the equality would be vacuous"


def test_full_cache_changes_nothing(loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path) -> None:
    """A cache at its bound, with every entry switched on and counted as if it always lost."""
    pair = loaded["int8"]
    cached = pair.engine("4", State(tmp_path, print))
    assert pair.pair.vocabulary is not None
    merges = [(s, t) for t, s in enumerate(pair.pair.vocabulary.spelling) if len(s) > 1]
    assert cached.cache is not None and len(merges) > cached.cache.capacity
    for spelling, target in merges[:5000]:
        cached.cache.observe(target, spelling)
        cached.cache.record(target, spelling, accepted=False)
    cached.save()
    assert len(cached.cache) == cached.cache.capacity
    again = pair.engine("4", State(tmp_path, print))
    assert again.cache is not None and len(again.cache) == again.cache.capacity
    for prompt, sampling in zip(prompts[10:14], (Sampling(), Sampling(0.7, seed=1)) * 2, strict=True):
        expected = pair.engine("off").generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
        assert again.generate(prompt, sampling=sampling, max_new_tokens=LENGTH).tokens == expected.tokens


def test_damaged_cache_changes_nothing(loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path) -> None:
    pair = loaded["int4"]
    expected = pair.engine("off").generate(prompts[0], sampling=Sampling(0.7, seed=5), max_new_tokens=LENGTH)
    pair.engine("4", State(tmp_path, print)).generate(LONG_WORDS, sampling=Sampling(), max_new_tokens=60)
    (cache,) = tmp_path.rglob("ngram_cache.json")
    cache.write_bytes(cache.read_bytes()[:-40])
    complaints: list[str] = []
    engine = pair.engine("4", State(tmp_path, complaints.append))
    assert engine.generate(prompts[0], sampling=Sampling(0.7, seed=5), max_new_tokens=LENGTH).tokens == expected.tokens
    assert len(complaints) == 1 and "ngram_cache.json" in complaints[0]


def test_a_random_drafter_changes_nothing(loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path) -> None:
    """The second control: a drafter with random weights guesses wrong, and the text stands."""
    pair = loaded["int4"].pair
    assert pair.drafter is not None
    shape = read_shape(json.loads((registry.locate("default") / "config.json").read_text()))
    rng = np.random.default_rng(0)

    def random_weight(name: str) -> np.ndarray:
        if "norm" in name:
            return np.ones(shape.hidden, np.float32)
        if "embed" in name:
            size = (shape.vocabulary, shape.hidden)
        else:
            size = shape.projection(name.split(".")[-2].removesuffix("_proj"))[::-1]
        return rng.normal(size=size).astype(np.float32) * 0.1

    onnx.save(build_graph(shape, random_weight, "int8"), tmp_path / "model.onnx")
    random = replace(pair, drafter=replace(pair.drafter, decoder=Decoder(tmp_path / "model.onnx")))
    for prompt, sampling in zip(prompts[:4], (Sampling(), Sampling(0.7, seed=1)) * 2, strict=True):
        expected = loaded["int4"].engine("off").generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
        got = Engine(random, Options("4"), NOWHERE, loaded["int4"].calibration).generate(
            prompt, sampling=sampling, max_new_tokens=LENGTH
        )
        assert got.tokens == expected.tokens
        assert got.acceptance_rate is not None and got.acceptance_rate < 0.1


def test_an_adapter_changes_proposals_and_not_the_text(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    pair = loaded["int8"].pair
    assert pair.drafter is not None
    engine = loaded["int8"].engine("2")
    before = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    assert pair.bundle.drafter.lora is not None
    rng = np.random.default_rng(0)
    adapter = {
        f"{name}.lora_{side}": rng.normal(size=(sizes[0], 4) if side == "A" else (4, sizes[1])).astype(np.float32) * 0.1
        for name, sizes in pair.bundle.drafter.lora["projections"].items()
        for side in "AB"
    }
    engine.use_adapter(adapter)
    after = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    assert after.tokens == before.tokens
    assert after.counts != before.counts, "the adapter was not applied"
    engine.use_adapter(None)
    again = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    assert again.counts["accepted"] == before.counts["accepted"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_invariant_from_w0_on_and_one_row_passes_are_not(loaded: dict[str, Loaded], precision: str) -> None:
    """The two-row rule itself, and its control: int4 in one-row passes gives other logits."""
    pair = loaded[precision]
    decoder, w0 = pair.pair.target.decoder, pair.w0
    assert w0 is not None and w0 <= 2
    ids = np.random.default_rng(1).integers(0, decoder.vocabulary, 220).tolist()
    decoder.reserve(256)

    def rows(widths: list[int], least: int) -> np.ndarray:
        decoder.rollback(0)
        prefill(decoder, ids[:196], 64, 2)
        out, at = [], 196
        for width in widths:
            out.append(decoder.run(ids[at : at + width] + [0] * (least - width))[:width].copy())
            at += width
            decoder.rollback(at)
        return np.concatenate(out)

    whole = rows([24], w0)
    for widths in ([1] * 24, [2] * 12, [3] * 8, [8] * 3, [1, 3, 2, 5, 1, 4, 6, 2]):
        assert np.array_equal(rows(widths, w0), whole), widths
    if precision == "int4":
        assert not np.array_equal(rows([1] * 24, 1), whole), "the rule would be idle"
