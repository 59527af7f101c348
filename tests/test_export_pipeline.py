"""The whole export on small checkpoints: bundle, parity gate, caches, and what happens when it fails."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from checkpoints import TEMPLATE, random_model, write_checkpoint, write_gguf
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from omnidraft.export import cache, drafter, gguf_source, parity, sources, target
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime import bundle
from omnidraft.runtime.acceptance import HEAD_FILE, AcceptanceHead, neutral
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError

# A random model's logits are close together: its top-1 says little about a quantized graph.
RANDOM = parity.Threshold(0.3, np.inf)

BEFORE = '{"schema": "omnidraft-bundle/2", "files": {}}'


class Log:
    """A Progress that remembers, and can raise at a step."""

    def __init__(self, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.planned, self.fail_at, self.error = 0, fail_at, error

    def plan(self, steps: int) -> None:
        self.planned = steps

    def step(self, what: str) -> None:
        self.steps.append(what)
        if len(self.steps) - 1 == self.fail_at and self.error is not None:
            raise self.error

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints of three architectures, one as .gguf."""
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "llama", "llama")
    write_checkpoint(folder / "qwen2", "qwen2", seed=1, head_dim=16)
    write_checkpoint(folder / "qwen3", "qwen3", seed=2)
    write_gguf(folder / "llama.gguf", random_model(seed=3), {"general.license": "mit"})
    return folder


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _settings(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_root", lambda: shared_cache)
    monkeypatch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "int8": RANDOM, "int4": RANDOM})


def test_a_trained_head_goes_into_the_bundle(models: Path, order: Order, tmp_path: Path) -> None:
    """Without one there is a neutral head and a note; one of another drafter is one clear line."""
    source = shutil.copytree(models / "llama", tmp_path / "drafter")
    log = Log()
    export(replace(order, drafter=str(source)), log)
    assert any("untrained" in note for note in log.notes)
    hidden = json.loads((source / "config.json").read_text())["hidden_size"]
    head = {name: value + 1 for name, value in neutral(hidden).items()}
    save_adapter(source / HEAD_FILE, head)
    log = Log()
    export(replace(order, drafter=str(source)), log)
    assert not any("untrained" in note for note in log.notes)
    made = open_bundle(order.out)
    assert made.drafter.head is not None
    found = load_adapter(order.out / made.drafter.head["weights"])
    assert all(np.array_equal(found[name], head[name]) for name in head)
    assert AcceptanceHead(order.out / made.drafter.head["graph"]).hidden_size == hidden
    save_adapter(source / HEAD_FILE, neutral(hidden + 1))
    with pytest.raises(OmniDraftError, match=f"^[^\n]*{HEAD_FILE}[^\n]*$"):
        export(replace(order, drafter=str(source)), Log())


@pytest.fixture
def order(models: Path, tmp_path: Path) -> Order:
    return Order(
        drafter=str(models / "llama"),
        targets={"gguf": str(models / "llama.gguf")},
        out=tmp_path / "out" / "bundle",
        precisions=("fp32",),
        drafter_precision="fp32",
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_holds_what_its_manifest_says(order: Order) -> None:
    log = Log()
    export(replace(order, precisions=("int8", "fp32", "int4"), drafter_precision="int8"), log)
    assert len(log.steps) == log.planned
    opened = open_bundle(order.out)
    opened.verify(opened.files)
    on_disk = {path.relative_to(order.out).as_posix() for path in order.out.rglob("*") if path.is_file()}
    assert on_disk == {*opened.files, "manifest.json"}
    made, found = opened.drafter, opened.targets["gguf"]
    assert (made.trainable, made.precision, made.license) == (True, "int8", "apache-2.0")
    assert made.lora is not None and made.lora["projections"]["layers.1.down"] == [128, 64]
    assert [graph.precision for graph in found.graphs] == ["int8", "fp32", "int4"]
    assert opened.graph("gguf", None).precision == "int8"
    assert (found.source, found.license) == ({"name": "llama.gguf", "kind": "gguf"}, "mit")
    assert (found.stop_ids, found.vocabulary, found.context) == ((0,), 384, 512)
    assert found.weights_sha256 == bundle.sha256(Path(order.targets["gguf"]))
    assert found.chat_template is not None and (order.out / found.chat_template).read_text() == TEMPLATE
    figures = opened.graph("gguf", "fp32").parity
    assert figures["positions"] == parity.POSITIONS and figures["greedy_tokens"] == parity.GREEDY
    assert figures["top1_agreement"] >= 0.995 and figures["greedy_equal"] and figures["max_logit_difference"] < 1e-3
    assert opened.graph("gguf", "int4").quantization["bits"] == 4
    assert {"onnxruntime", "torch", "omnidraft"} <= set(opened.tools)
    assert not re.search(r"/(tmp|home|root)/", (order.out / "manifest.json").read_text())


def test_a_second_export_builds_and_converts_nothing(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    export(order, Log())
    first = json.loads((order.out / "manifest.json").read_text())

    def fail(*_: object) -> None:
        raise AssertionError("made a second time")

    for module, name in ((target, "_run_builder"), (gguf_source, "convert"), (parity, "_compute")):
        monkeypatch.setattr(module, name, fail)
    export(order, Log())
    second = json.loads((order.out / "manifest.json").read_text())
    assert {**first, "created": ""} == {**second, "created": ""}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_architectures_pass_as_targets_and_as_untrainable_drafters(kind: str, order: Order, models: Path) -> None:
    log = Log()
    source = str(models / kind)
    export(replace(order, drafter=source, targets={"one": source}), log)
    opened = open_bundle(order.out)
    assert (opened.drafter.trainable, opened.drafter.lora) == (False, None)
    assert any("cannot learn" in note and "ForCausalLM" in note for note in log.notes)
    assert opened.graph("one", "fp32").parity["greedy_equal"]
    decoder = Decoder(order.out / opened.drafter.model)
    logits = decoder.run([5, 6, 7])
    assert decoder.hidden is not None and decoder.hidden.shape == (3, 64) and logits.shape == (3, 384)


@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_weight_fails_the_gate(
    layer: int, order: Order, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter whose graph has one matrix 5 % too large is refused, and the bundle before stays."""
    export(order, Log())
    before = snapshot(order.out)
    real = drafter.Weights.__call__

    def damaged(self: drafter.Weights, name: str) -> Any:
        factor = 1.05 if name == f"model.layers.{layer}.self_attn.v_proj.weight" else 1.0
        return real(self, name) * np.float32(factor)

    monkeypatch.setattr(drafter.Weights, "__call__", damaged)
    with pytest.raises(OmniDraftError, match=r"the drafter at fp32 does not match its source: .*not written$"):
        export(order, Log())
    assert snapshot(order.out) == before
    assert [path.name for path in order.out.parent.iterdir()] == ["bundle"]


def test_a_damaged_target_graph_fails_the_gate(order: Order, tmp_path: Path, models: Path) -> None:
    source = sources.resolve(sources.locate(str(models / "qwen3")))
    made = target.build_target(source, "fp32")
    expected = parity.reference(source, 1)
    parity.require(parity.measure(Decoder(made / "model.onnx"), expected, source.context), "fp32", "the graph")
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    model = onnx.load(broken / "model.onnx")
    weight = next(tensor for tensor in model.graph.initializer if "down_proj" in tensor.name)
    values = np.frombuffer(weight.raw_data, np.float32).copy()
    values[: len(values) // 2] *= -1
    weight.raw_data = values.tobytes()
    onnx.save(model, broken / "model.onnx")
    with pytest.raises(OmniDraftError, match="does not match its source"):
        parity.require(parity.measure(Decoder(broken / "model.onnx"), expected, source.context), "fp32", "the graph")


def figures(**changes: Any) -> dict[str, Any]:
    good = {"top1_agreement": 1.0, "max_logit_difference": 1e-4, "greedy_equal": True, "greedy_margin": None}
    return {**good, "perplexity": 9.0, "source_perplexity": 9.0, **changes}


def test_thresholds() -> None:
    parity.require(figures(), "fp32", "it")
    parity.require(figures(greedy_equal=False, greedy_margin=1e-3), "fp32", "it")  # a tie in the source itself
    for bad in ({"top1_agreement": 0.9}, {"max_logit_difference": 0.1}, {"greedy_equal": False, "greedy_margin": 0.5}):
        with pytest.raises(OmniDraftError, match="it at fp32 does not match"):
            parity.require(figures(**bad), "fp32", "it")
    parity.require(figures(top1_agreement=0.7, perplexity=11.0), "a16w8", "it")
    for bad in ({"top1_agreement": 0.5}, {"perplexity": 12.0}):
        with pytest.raises(OmniDraftError, match="it at a16w8 does not match"):
            parity.require(figures(**bad), "a16w8", "it")


def test_a_graph_that_gives_no_numbers_fails(order: Order, models: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "infinite")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OmniDraftError, match="does not match its source"):
        export(replace(order, drafter=str(folder)), Log())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OmniDraftError("something"), OSError(28, "No space left")])
@pytest.mark.parametrize("step", range(5))
def test_a_failed_export_changes_nothing(step: int, error: BaseException, order: Order) -> None:
    order.out.mkdir(parents=True)
    (order.out / "manifest.json").write_text(BEFORE)
    expected = OmniDraftError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        export(order, Log(step, error))
    assert snapshot(order.out) == {"manifest.json": BEFORE.encode()}
    assert [path.name for path in order.out.parent.iterdir()] == ["bundle"]


def test_a_rename_that_fails_brings_the_old_bundle_back(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    order.out.mkdir(parents=True)
    (order.out / "manifest.json").write_text(BEFORE)
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OmniDraftError, match="not written"):
        export(order, Log())
    assert snapshot(order.out) == {"manifest.json": BEFORE.encode()}


def test_a_folder_that_is_no_bundle_is_left_alone(order: Order) -> None:
    order.out.mkdir(parents=True)
    (order.out / "letter.txt").write_text("mine")
    with pytest.raises(OmniDraftError, match="not a bundle; choose another folder"):
        export(order, Log())
    assert snapshot(order.out) == {"letter.txt": b"mine"}


def test_what_is_not_of_the_bundle_is_never_deleted(order: Order) -> None:
    """Neither another program's folder that holds a manifest.json, nor a user's file inside a bundle."""
    order.out.mkdir(parents=True)
    (order.out / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(OmniDraftError, match="not a bundle"):
        export(order, Log())
    (order.out / "manifest.json").write_text(BEFORE)
    (order.out / "notes.txt").write_text("mine")
    with pytest.raises(OmniDraftError, match=r"notes\.txt: is not of the bundle"):
        export(order, Log())
    assert (order.out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precisions": ("int8", "int3")}, "--precision int3: unknown here; choose from fp32, int8, int4$"),
        ({"precisions": ("int8", "int8")}, "each once"),
        ({"precisions": ("a16w8",)}, "--precision a16w8: unknown here"),
        ({"profiles": ()}, "one or more"),
        ({"profiles": ("gpu",)}, "--profile gpu: unknown here; choose from cpu, "),
        ({"context": 256}, "--context is for static graphs"),
        ({"drafter_precision": "fp16"}, "--drafter-precision fp16: unknown here"),
        ({"targets": {}}, "at least one target"),
        ({"targets": {"a/b": "smollm2"}}, "letters, digits"),
        ({"targets": {"..": "smollm2"}}, "letters, digits"),
        ({"drafter": "nothing"}, "nothing: no such folder"),
    ],
)
def test_bad_orders_are_refused_at_once(change: dict[str, Any], message: str, order: Order) -> None:
    with pytest.raises(OmniDraftError, match=message):
        export(replace(order, **change), Log())
    assert not order.out.exists()


@pytest.mark.parametrize(
    ("starve", "message"),
    [
        (lambda m: m.setattr(psutil, "virtual_memory", lambda: namedtuple("M", "available")(1 << 20)), "GB of memory"),
        (lambda m: m.setattr(shutil, "disk_usage", lambda _: namedtuple("D", "free")(10)), "GB on its disk"),
    ],
)
def test_too_little_memory_or_disk_is_said_before_the_work(
    starve: Callable[[pytest.MonkeyPatch], None], message: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch)
    log = Log()
    with pytest.raises(OmniDraftError, match=message):
        export(order, log)
    assert log.steps == [] and not order.out.exists()


def test_a_tokenizer_nobody_can_use_is_said_before_the_work(order: Order, models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "llama", tmp_path / "unigram")
    Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).save(str(folder / "tokenizer.json"))
    for change, before in (({"drafter": str(folder)}, 1), ({"targets": {"odd": str(folder)}}, 3)):
        log = Log()
        with pytest.raises(OmniDraftError, match="of kind 'Unigram"):
            export(replace(order, **change), log)
        assert len(log.steps) == before and not order.out.exists()


def test_an_architecture_nobody_knows_is_one_line(order: Order, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "gpt", "gpt_neox", num_key_value_heads=4, head_dim=16)
    with pytest.raises(OmniDraftError, match="GPTNeoXForCausalLM is not known to onnxruntime-genai"):
        export(replace(order, targets={"gpt": str(folder)}), Log())


def test_the_bars_steps_are_all_planned(order: Order, models: Path) -> None:
    log = Log()
    export(replace(order, targets={"a": str(models / "llama"), "b": str(models / "qwen3")}), log)
    assert len(log.steps) == log.planned == 8
