"""One drafter serves two targets of different architecture and vocabulary, each with a map and a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TARGETS

from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.vocabulary import VocabularyMap

pytestmark = pytest.mark.model
GREEDY, WARM = Sampling(), Sampling(0.7, top_p=0.95, seed=3)


def test_two_targets_have_little_in_common_but_their_drafter(bundle: Path) -> None:
    opened = open_bundle(bundle)
    first, second = (opened.targets[name] for name in TARGETS)
    assert (first.architecture, second.architecture) == ("LlamaForCausalLM", "Qwen3ForCausalLM")
    assert first.vocabulary != second.vocabulary and first.tokenizer_sha256 != second.tokenizer_sha256
    assert first.map != second.map and first.chat_template != second.chat_template


@pytest.mark.parametrize("target", TARGETS)
def test_the_map_merges_and_splits(bundle: Path, target: str) -> None:
    """The control of what follows: neither vocabulary is a part of the other."""
    engine = Engine.open(bundle, target)
    assert isinstance(engine.pair.vocabulary, VocabularyMap)
    spellings, pieces = engine.pair.vocabulary.spelling, engine.pair.vocabulary.pieces
    assert sum(len(drafts) > 1 for drafts in spellings) > 1000, "target tokens that several draft tokens spell"
    assert sum(len(targets) > 1 for targets in pieces) > 50, "draft tokens that several target tokens spell"


def test_switching_the_target_switches_text_and_cache_and_not_the_drafter(
    bundle: Path, prompts: list[str], tmp_path: Path
) -> None:
    """Turn by turn on one state folder: each text is plain decoding's, and what is learned stays with its target."""
    state = State(tmp_path, print)
    plain = {name: Engine.open(bundle, name, options=Options("off")) for name in TARGETS}
    drafted = {name: Engine.open(bundle, name, options=Options("3"), state=state) for name in TARGETS}
    accepted = dict.fromkeys(TARGETS, 0)
    for i, prompt in enumerate(prompts[:8]):
        for name, engine in drafted.items():
            sampling = WARM if i % 2 else GREEDY
            expected = plain[name].generate(prompt, sampling=sampling, max_new_tokens=28)
            got = engine.generate(prompt, sampling=sampling, max_new_tokens=28)
            assert got.tokens == expected.tokens
            accepted[name] += got.counts["accepted"]
    assert min(accepted.values()) > 20, "the drafter serves both"
    first, second = (engine.cache_path for engine in drafted.values())
    assert first is not None and second is not None and first != second
    assert first.is_file() and second.is_file() and first.read_bytes() != second.read_bytes()
    assert len({engine.pair.bundle.drafter.weights_sha256 for engine in drafted.values()}) == 1


@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
def test_the_second_target_is_lossless_at_every_precision(bundle: Path, prompts: list[str], precision: str) -> None:
    plain = Engine.open(bundle, "qwen3", precision, options=Options("off"))
    for k in (1, 2, 5, 8):
        engine = Engine.open(bundle, "qwen3", precision, options=Options(str(k)))
        for i, prompt in enumerate(prompts[k : k + 6]):
            sampling = WARM if i % 2 else GREEDY
            expected = plain.generate(prompt, sampling=sampling, max_new_tokens=32)
            assert engine.generate(prompt, sampling=sampling, max_new_tokens=32).tokens == expected.tokens
