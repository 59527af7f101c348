"""Decoding over graphs of fixed widths: the dynamic graph's text, equal bits in any width, and the loop unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import CORPUS, write_checkpoint
from conftest import NOWHERE
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.export.drafter import Weights
from omnidraft.export.llama_graph import build_graph, read_shape
from omnidraft.export.sources import Source, locate, resolve
from omnidraft.export.static_graph import write_static
from omnidraft.export.static_quantize import quantize_static
from omnidraft.runtime.calibration import Calibration
from omnidraft.runtime.decoder import Decoder, prefill
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.invariance import CHUNK, probe
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import LoadedModel, Pair, load_pair
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.static_decoder import StaticDecoder, exact_width

pytest.importorskip("torch")
WIDTHS, CONTEXT = (1, 3, 16), 96
IDS = np.random.default_rng(5).integers(0, 384, CONTEXT).tolist()


class RightAligned(StaticDecoder):
    """The control: the usual window, whose newest key always stands in the last slot."""

    def _fill(self, graph: Any, ids: Sequence[int] | np.ndarray) -> None:
        super()._fill(graph, ids)
        slots, width = self.context, graph.width
        first = slots - width - self.length
        if first < 0:
            return
        order = np.full(slots, -slots, np.int32)
        order[first : slots - width] = np.arange(self.length) - slots
        order[slots - width :] = np.arange(width)
        graph.inputs["order"][:] = order
        slot, last = np.arange(slots)[None], slots - width + np.arange(width)[:, None]
        graph.inputs["attention_mask"][0, 0] = np.where((slot >= first) & (slot <= last), 0, self._masked)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve(locate(str(write_checkpoint(tmp_path_factory.mktemp("model")))))


@pytest.fixture(scope="module")
def folder(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("static")


@pytest.fixture(scope="module")
def description(source: Source, folder: Path) -> dict[str, Any]:
    return write_static(source, folder, WIDTHS, CONTEXT, True)


@pytest.fixture(scope="module")
def static(folder: Path, description: dict[str, Any]) -> StaticDecoder:
    return StaticDecoder(folder, description)


@pytest.fixture(scope="module")
def dynamic(source: Source, folder: Path) -> Decoder:
    onnx.save(build_graph(read_shape(source.config), Weights(source), "fp32"), folder / "dynamic.onnx")
    return Decoder(folder / "dynamic.onnx")


@pytest.fixture(scope="module")
def quantized(source: Source, folder: Path, description: dict[str, Any]) -> StaticDecoder:
    samples = [np.random.default_rng(seed).integers(0, 384, 60).tolist() for seed in range(3)]
    return StaticDecoder(folder, quantize_static(folder, description, "a16w8", samples))


def rows(decoder: StaticDecoder | Decoder, sizes: Sequence[int], start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of IDS in passes of these sizes."""
    decoder.rollback(start)
    logits, hidden = [], []
    for size in sizes:
        logits.append(decoder.run(IDS[decoder.length : decoder.length + size]).copy())
        assert decoder.hidden is not None
        hidden.append(decoder.hidden.copy())
    return np.concatenate(logits), np.concatenate(hidden)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return float(np.abs(found - expected).max() / np.abs(expected).max()) <= 1e-4


@pytest.mark.parametrize("sizes", [[96], [16] * 6, [1] * 96, [40, 1, 2, 3, 17, 33], [95, 1]], ids=str)
def test_logits_are_the_dynamic_graphs(static: StaticDecoder, dynamic: Decoder, sizes: list[int]) -> None:
    """For every position of the window, however it is cut; the pads of the last passes have no slot any more."""
    assert static.widths == WIDTHS and static.capacity == CONTEXT
    for ours, theirs in zip(rows(static, sizes), rows(dynamic, [96]), strict=True):
        assert close(ours, theirs)


def greedy(decoder: StaticDecoder | Decoder, prompt: Sequence[int], count: int, least: int) -> list[int]:
    decoder.rollback(0)
    tokens = [int(prefill(decoder, prompt, 16, least).argmax())]
    while len(tokens) < count:
        logits = decoder.run([tokens[-1]] * least)
        decoder.rollback(len(prompt) + len(tokens))
        tokens.append(int(logits[0].argmax()))
    return tokens


def test_greedy_text_is_the_dynamic_graphs(static: StaticDecoder, dynamic: Decoder) -> None:
    for length in (1, 2, 15, 16, 17, 40):
        expected = greedy(dynamic, IDS[:length], 30, 2)
        assert len(set(expected)) > 3
        assert greedy(static, IDS[:length], 30, 1) == expected
        assert greedy(static, IDS[:length], 30, 2) == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=4, max_size=12), st.integers(0, 5))
def test_any_passes_of_two_rows_and_more_give_the_same_bits(static: StaticDecoder, sizes: list[int], back: int) -> None:
    """Slots, widths, pads, neighbours and what was rolled back do not matter: a key stands where its position is."""
    whole, hidden = rows(static, [32, 32, 32])
    static.rollback(0)
    for size in sizes:
        size = min(size, CONTEXT - static.length)
        if size < 2:
            break
        begin = static.length
        assert np.array_equal(static.run(IDS[begin : begin + size]), whole[begin : begin + size])
        assert static.hidden is not None and np.array_equal(static.hidden, hidden[begin : begin + size])
        static.rollback(static.length - min(back, size - 1))


@pytest.mark.parametrize("kind", ["float", "a16w8"])
def test_at_one_width_neither_slot_nor_neighbours_matter(
    static: StaticDecoder, quantized: StaticDecoder, kind: str
) -> None:
    """What an exact decode needs; and W₀ is found on static graphs as on others."""
    decoder = static if kind == "float" else quantized
    assert exact_width(decoder, CONTEXT) == 3 and decoder.length == 0
    assert probe(decoder, CONTEXT) in (1, 2)


def test_a_right_aligned_window_would_change_bits(folder: Path, description: dict[str, Any], static: Any) -> None:
    """The control of the two tests above: same graphs, same numbers, keys in other slots."""
    right = RightAligned(folder, description)
    expected, _ = rows(static, [16] + [3] * 16)
    threes, _ = rows(right, [16] + [3] * 16)
    twos, _ = rows(right, [16] + [2] * 24)
    assert close(threes, expected) and close(twos, expected)
    assert not np.array_equal(threes, twos)
    assert exact_width(right, CONTEXT) is None


def test_run_refuses_what_does_not_fit_and_rollback_what_is_not_there(static: StaticDecoder) -> None:
    static.rollback(0)
    static.reserve(10 * CONTEXT)
    assert static.capacity == CONTEXT, "a wish does not make the window longer"
    static.run(IDS[: CONTEXT - 1])
    with pytest.raises(ValueError, match="2 rows behind 95 do not fit 96"):
        static.run([1, 2])
    static.run([1])
    with pytest.raises(ValueError, match="do not fit"):
        static.run([1])
    with pytest.raises(ValueError, match="do not fit"):
        static.run([])
    with pytest.raises(ValueError, match="cannot roll back from 96 rows to 97"):
        static.rollback(97)


def test_a_graph_that_is_not_the_one_described_is_named(folder: Path, description: dict[str, Any]) -> None:
    for change, line in (
        ({"widths": {"3": "s16.onnx"}}, r"s16\.onnx: input_ids is \[1, 16\], .* says \[1, 3\]; export again"),
        ({"context": 64}, r"order is \[96\], its description says \[64\]; export again"),
        ({"layers": 1}, r"past_key_1 is \[1, 2, 96, 32\], its description says not there; export again"),
        ({"vocabulary": 385}, r"logits is \[1, 1, 384\], its description says \[1, 1, 385\]; export again"),
        ({"widths": {"3": "none.onnx"}}, r"none\.onnx: .*export again"),
    ):
        with pytest.raises(OmniDraftError, match=f"^[^\n]*{line}[^\n]*$"):
            StaticDecoder(folder, {**description, **change})


@pytest.fixture(scope="module")
def pair(bundle: Path) -> Pair:
    """The second target, small and trained, at fp32 with the shipped drafter."""
    return load_pair(bundle, "qwen3", "fp32")


LENGTH, K, ROOM = 32, 2, 256


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> dict[str, StaticDecoder]:
    """Static graphs of both models of the pair; the target also quantized, calibrated on the tests' texts."""
    folder = tmp_path_factory.mktemp("pair")
    source, widths = resolve(locate("qwen3-10m")), (1, K + 1, CHUNK)
    described = write_static(source, folder / "target", widths, ROOM, False)
    samples = [pair.target.tokens.encode(text.encode()) for text in CORPUS]
    integers = quantize_static(folder / "target", described, "a16w8", samples)
    drafter = write_static(resolve(locate("default")), folder / "drafter", (1, 4, CHUNK), ROOM, True, 8)
    return {
        "float": StaticDecoder(folder / "target", described),
        "a16w8": StaticDecoder(folder / "target", integers),
        "drafter": StaticDecoder(folder / "drafter", drafter),
    }


def static_pair(pair: Pair, target: StaticDecoder | None, drafter: StaticDecoder | None) -> Pair:
    """The pair with static decoders in place of those that are given."""

    def exchange(model: LoadedModel[Any], decoder: StaticDecoder | None) -> LoadedModel[Any]:
        if decoder is None:
            return model
        return replace(model, decoder=decoder, info=replace(model.info, context=decoder.context))

    assert pair.drafter is not None
    return replace(pair, target=exchange(pair.target, target), drafter=exchange(pair.drafter, drafter))


def texts(pair: Pair, prompts: Sequence[str], draft: str, w0: int) -> tuple[list[list[int]], int]:
    """Tokens of each answer, greedy and sampled in turn, and how many proposals were accepted."""
    engine, accepted, found = Engine(pair, Options(draft), NOWHERE, Calibration(w0)), 0, []
    for i, prompt in enumerate(prompts):
        sampling = Sampling(0.7, top_p=0.95, seed=i) if i % 2 else Sampling()
        report = engine.generate(prompt, sampling=sampling, max_new_tokens=LENGTH)
        found.append(report.tokens)
        accepted += report.counts["accepted"] if draft != "off" else 0
    return found, accepted


@pytest.mark.model
def test_speculative_text_is_plain_text_is_the_dynamic_graphs(
    pair: Pair, models: dict[str, StaticDecoder], prompts: list[str]
) -> None:
    """Target static, drafter static, both: the engine does not know. Drafts stay within the decode width, or not."""
    asked = prompts[:4]
    dynamic, _ = texts(pair, asked, "off", 2)
    for target, drafter, drafts in (
        ("float", "drafter", ("off", str(K), "5")),
        ("float", None, ("5",)),
        (None, "drafter", (str(K),)),
    ):
        made = static_pair(pair, models.get(target or ""), models.get(drafter or ""))
        for draft in drafts:
            found, accepted = texts(made, asked, draft, 2)
            assert found == dynamic and (draft == "off" or accepted > 20)


@pytest.mark.model
def test_quantized_speculative_text_is_quantized_plain_text(
    pair: Pair, models: dict[str, StaticDecoder], prompts: list[str]
) -> None:
    made = static_pair(pair, models["a16w8"], models["drafter"])
    plain, _ = texts(made, prompts[:4], "off", K + 1)
    drafted, accepted = texts(made, prompts[:4], str(K), K + 1)
    assert drafted == plain and accepted > 15


@pytest.mark.model
def test_an_adapter_changes_proposals_and_not_the_text(
    pair: Pair, models: dict[str, StaticDecoder], prompts: list[str]
) -> None:
    made = static_pair(pair, models["float"], models["drafter"])
    engine = Engine(made, Options(str(K)), NOWHERE, Calibration(2))
    before = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    rng, lora = np.random.default_rng(0), pair.bundle.drafter.lora
    assert lora is not None
    adapter = {
        f"{name}.lora_{side}": rng.normal(size=(sizes[0], 4) if side == "A" else (4, sizes[1])).astype(np.float32) * 0.1
        for name, sizes in lora["projections"].items()
        for side in "AB"
    }
    engine.use_adapter(adapter)
    after = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    engine.use_adapter(None)
    again = engine.generate(prompts[0], sampling=Sampling(), max_new_tokens=LENGTH)
    assert before.tokens == after.tokens == again.tokens
    assert after.counts["accepted"] < before.counts["accepted"] == again.counts["accepted"]
