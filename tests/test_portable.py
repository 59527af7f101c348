"""Portable graphs: optimum-onnx in a folder of its own, what it writes, and decoding on that."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import random_model, write_checkpoint
from test_pack import Quiet

from omnidraft.adapters.layout import Layout
from omnidraft.export import cache, portable
from omnidraft.export.order import Order, check, read_profiles
from omnidraft.export.pipeline import export
from omnidraft.export.portable import REQUIREMENTS, SETUP, build_portable, older_config
from omnidraft.export.sources import Source, locate, resolve
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.placement import Wish, read_wishes
from omnidraft.runtime.portable_decoder import PortableDecoder
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.setup_optimum import install

# Rotary settings that the older transformers has other words for, and that its defaults are not.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
    "llama, scaled": ("llama", {"rope_parameters": {"rope_theta": 900.0, "rope_type": "linear", "factor": 3.0}}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """optimum-onnx, installed as setup-optimum does (some twenty seconds)."""
    folder = tmp_path_factory.mktemp("optimum") / "packages"
    try:
        install(folder)
    except OmniDraftError as error:
        if "pip could not install" in str(error):
            pytest.skip(str(error))
        raise
    return folder


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder)
        yield


def checkpoint(folder: Path, variant: str) -> Source:
    kind, overrides = VARIANTS[variant]
    return resolve(locate(str(write_checkpoint(folder, kind, **overrides))))


@pytest.fixture(scope="module")
def llama(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of a random model."""
    source = checkpoint(tmp_path_factory.mktemp("llama") / "llama", "llama")
    return build_portable(source, packages) / "model.onnx"


IDS = np.random.default_rng(0).integers(0, 384, 40).tolist()


# What is written


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_the_checkpoints(variant: str, packages: Path, tmp_path: Path) -> None:
    """In one pass and in chunks; the older transformers reads the rotary settings as they are meant."""
    source = checkpoint(tmp_path / "source", variant)
    kind, overrides = VARIANTS[variant]
    with torch.inference_mode():
        wanted = random_model(kind, **overrides)(torch.tensor([IDS])).logits[0].numpy()
    decoder = PortableDecoder(build_portable(source, packages) / "model.onnx")
    np.testing.assert_allclose(decoder.run(IDS), wanted, atol=1e-3)
    decoder.rollback(0)
    chunks = [decoder.run(IDS[begin:end]) for begin, end in ((0, 1), (1, 9), (9, 30), (30, 40))]
    np.testing.assert_allclose(np.concatenate(chunks), wanted, atol=1e-3)

    with torch.inference_mode():
        plain = random_model(kind)(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(plain - wanted).max() > 0.1, "with the defaults it would be another model"


def test_a_configuration_is_put_in_the_older_words() -> None:
    plain = {"hidden_size": 8}
    assert older_config(plain) is plain
    rotary = {"rope_theta": 5.0, "rope_type": "default"}
    assert older_config({**plain, "rope_parameters": rotary}) == {**plain, "rope_theta": 5.0}
    scaled = {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}
    wanted = {**plain, "rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert older_config({**plain, "rope_parameters": scaled}) == wanted
    by_layer = {"rope_parameters": {"full_attention": rotary}}
    assert older_config(by_layer) is by_layer, "what is not understood is left to the parity gate"


def test_the_graph_has_plain_operators_only(llama: Path) -> None:
    model = onnx.load(llama)
    assert {node.domain for node in model.graph.node} == {""}
    assert {entry.domain for entry in model.opset_import} == {""}
    assert model.opset_import[0].version <= 21, "what mobile and web runtimes read"
    assert {"MatMul", "Softmax", "Concat"} <= {node.op_type for node in model.graph.node}


def test_a_graph_is_made_once(llama: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_run_worker", lambda *_: pytest.fail("it was there"))
    assert build_portable(checkpoint(tmp_path / "again", "llama"), packages) == llama.parent


# Decoding on it


def test_rows_that_are_rolled_back_never_were(llama: Path) -> None:
    decoder = PortableDecoder(llama)
    decoder.run(IDS[:20])
    wanted = decoder.run(IDS[20:30]).copy()
    decoder.rollback(20)
    decoder.run(IDS[30:37])
    decoder.rollback(20)
    assert np.array_equal(decoder.run(IDS[20:30]), wanted)
    decoder.rollback(19)
    assert not np.array_equal(decoder.run(IDS[20:30]), wanted), "the past counts"


def test_room_for_the_past_is_kept_to(llama: Path) -> None:
    decoder = PortableDecoder(llama)
    decoder.reserve(300)
    assert decoder.capacity == 512 and decoder.length == 0
    for _ in range(12):
        decoder.run(IDS)
    assert decoder.length == 480
    for bad in ([], IDS):
        with pytest.raises(ValueError, match="do not fit 512"):
            decoder.run(bad)
    with pytest.raises(ValueError, match="cannot roll back from 480 rows to 481"):
        decoder.rollback(481)
    decoder.reserve(100)
    assert (decoder.capacity, decoder.length) == (512, 480)


def test_there_is_no_lora(llama: Path) -> None:
    decoder = PortableDecoder(llama)
    decoder.set_adapter(None)
    with pytest.raises(OmniDraftError, match="has no LoRA inputs"):
        decoder.set_adapter({})


def test_another_kind_of_graph_is_refused(graphs: tuple[Path, Layout], llama: Path, tmp_path: Path) -> None:
    with pytest.raises(OmniDraftError, match=r"loss.onnx: not a portable graph \(it lacks logits\); export again"):
        PortableDecoder(graphs[0] / "loss.onnx")
    model = onnx.load(llama)
    model.graph.input.append(onnx.helper.make_tensor_value_info("mood", onnx.TensorProto.FLOAT, [1]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(OmniDraftError, match=r"not a portable graph \(it wants mood\)"):
        PortableDecoder(tmp_path / "model.onnx")


# Setting up


def test_where_optimum_is_missing_the_line_says_what_to_do(packages: Path, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "qwen3")
    with pytest.raises(OmniDraftError, match="run omnidraft setup-optimum"):
        build_portable(source, tmp_path / "nowhere")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / SETUP).write_text(json.dumps({"packages": [*REQUIREMENTS[1:], "optimum-onnx==0.0.1"]}))
    with pytest.raises(OmniDraftError, match=r"holds other versions .*; run omnidraft setup-optimum"):
        build_portable(source, tmp_path / "old")


def test_an_architecture_that_optimum_does_not_know_is_one_line(packages: Path, tmp_path: Path) -> None:
    source = resolve(locate(str(write_checkpoint(tmp_path / "strange"))))
    strange = Source(**{**vars(source), "config": {**source.config, "model_type": "no_such_type"}})
    with pytest.raises(
        OmniDraftError, match=r"strange: optimum-onnx 0\.1\.0 cannot export it \(.*no_such_type"
    ) as caught:
        build_portable(strange, packages)
    assert "\n" not in str(caught.value)


def test_a_failing_pip_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        OmniDraftError, match=r"pip could not install optimum-onnx .*No matching distribution"
    ) as caught:
        install(tmp_path / "packages")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


# In a bundle


@pytest.fixture(scope="module")
def both(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a target of both kinds of dynamic graphs, at fp32; drafter and target have the same weights."""
    folder = tmp_path_factory.mktemp("both")
    source = str(write_checkpoint(folder / "llama", **VARIANTS["llama"][1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_OPTIMUM_PACKAGES", str(packages))
        profiles = ("cpu", "portable")
        export(Order(source, {"one": source}, folder / "bundle", ("fp32",), "fp32", profiles=profiles), Quiet())
    return folder / "bundle"


def answers(bundle: Path, profile: str, draft: str, sampling: Sampling) -> list[list[int]]:
    wishes = read_wishes("cpu", profile=profile)
    engine = Engine.open(bundle, options=Options(draft), threads=1, wishes=wishes)
    assert engine.pair.graphs["target"].profile == profile
    reports = [engine.generate(prompt, sampling=sampling, max_new_tokens=24) for prompt in ("Salt?", "A boat.")]
    if draft != "off":
        assert sum(report.counts["accepted"] for report in reports) > 0
    return [report.tokens for report in reports]


@pytest.mark.parametrize("law", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_other_graphs(both: Path, law: Sampling) -> None:
    plain = answers(both, "cpu", "off", law)
    assert answers(both, "portable", "off", law) == plain
    assert answers(both, "portable", "3", law) == plain


def test_the_manifest_says_what_it_is(both: Path) -> None:
    bundle = open_bundle(both)
    cpu, made = bundle.targets["one"].graphs
    assert (cpu.profile, made.profile, made.precision) == ("cpu", "portable", "fp32")
    assert made.parity["top1_agreement"] == 1.0 and made.opset <= 21
    assert bundle.graph("one", None, Wish().profiles) is cpu, "which is the quicker one"


def test_the_exporter_stands_for_its_profile() -> None:
    assert read_profiles("cpu,static", "optimum") == ("portable", "static")
    for text, exporter, line in (
        ("cpu", "onnx", "--exporter onnx: unknown"), ("static", "optimum", "add cpu to --profile"),
    ):  # fmt: skip
        with pytest.raises(OmniDraftError, match=line):
            read_profiles(text, exporter)


def test_an_order_that_cannot_be_met_is_refused_before_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: Path
) -> None:
    order = Order("default", {"one": "smollm2"}, tmp_path / "out", ("int8",), "int8", profiles=("portable",))
    monkeypatch.setenv("OMNIDRAFT_OPTIMUM_PACKAGES", str(tmp_path / "nowhere"))
    with pytest.raises(OmniDraftError, match="run omnidraft setup-optimum"):
        check(order)
    monkeypatch.setenv("OMNIDRAFT_OPTIMUM_PACKAGES", str(packages))
    with pytest.raises(OmniDraftError, match="--precision int8: unknown here; choose from fp32"):
        check(order)
