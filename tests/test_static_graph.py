"""Static graphs against transformers, their operators, and the scales of their quantized forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import random_model, write_tokenizer
from onnx import numpy_helper

from omnidraft.export.llama_graph import lora_sizes, read_shape
from omnidraft.export.sources import Source, locate, resolve
from omnidraft.export.static_graph import obstacle, write_static
from omnidraft.export.static_quantize import quantize_static
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.static_decoder import StaticDecoder

torch = pytest.importorskip("torch")
WIDTHS, CONTEXT, RANK = (1, 3, 16), 96, 4
IDS = np.random.default_rng(5).integers(0, 384, 70)
# Each runs on the HTP and is in NNAPI's list.
OPERATORS = {
    "Add", "Concat", "Div", "Gather", "MatMul", "Mul", "Neg", "ReduceMean", "Reshape", "Sigmoid", "Softmax", "Split",
    "Sqrt", "Transpose",
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, no grouping, untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}),
    "qwen2, biases": ("qwen2", {"head_dim": 16}),
    "qwen3, head norms, one kv head": ("qwen3", {"num_key_value_heads": 1, "rms_norm_eps": 1e-4}),
}


def checkpoint(folder: Path, kind: str = "llama", **overrides: Any) -> tuple[Any, Source]:
    """(torch model, source) with random biases and norms too: transformers begins with zeros and ones."""
    model = random_model(kind, **overrides)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value += 0.3 * torch.randn(value.shape)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model, resolve(locate(str(folder)))


def run(decoder: StaticDecoder) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of IDS in passes of every width, with wrong rows that are rolled back."""
    decoder.rollback(0)
    logits, hidden = [], []
    for begin, end in ((0, 37), (37, 40), (40, 41), (41, 43), (43, 70)):
        if begin == 40:
            decoder.run([1, 2, 3])
            decoder.rollback(begin)
        logits.append(decoder.run(IDS[begin:end]).copy())
        assert decoder.hidden is not None
        hidden.append(decoder.hidden.copy())
    return np.concatenate(logits), np.concatenate(hidden)


def torch_run(model: Any) -> tuple[np.ndarray, np.ndarray]:
    with torch.inference_mode():
        out = model(torch.tensor(IDS)[None], output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def graphs(folder: Path, description: dict[str, Any]) -> list[onnx.ModelProto]:
    return [onnx.load(folder / name) for name in description["widths"].values()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_hidden_states_are_transformers(variant: str, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[variant]
    model, source = checkpoint(tmp_path / "model", kind, **overrides)
    found = run(StaticDecoder(tmp_path / "static", write_static(source, tmp_path / "static", WIDTHS, CONTEXT, True)))
    for ours, theirs in zip(found, torch_run(model), strict=True):
        assert relative(ours, theirs) <= 1e-4


def test_a_bias_and_a_rope_factor_count(tmp_path: Path) -> None:
    """The control of the parity above: without them the logits are others."""
    for variant, change in (("qwen2, biases", "bias"), ("llama, linear rope", "factor")):
        kind, overrides = VARIANTS[variant]
        model, source = checkpoint(tmp_path / change, kind, **overrides)
        description = write_static(source, tmp_path / change / "static", WIDTHS, CONTEXT, True)
        if change == "factor":
            description["rope_factor"] = 1.0
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("bias"):
                    value.zero_()
        logits, _ = run(StaticDecoder(tmp_path / change / "static", description))
        assert relative(logits, torch_run(model)[0]) > 1e-2


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, Any]]:
    """(torch model, folder, description) of a drafter's graphs with LoRA inputs."""
    folder = tmp_path_factory.mktemp("drafter")
    model, source = checkpoint(folder / "model")
    return model, folder, write_static(source, folder, WIDTHS, CONTEXT, True, RANK)


def test_graphs_are_plain_and_fixed(drafter: tuple[Any, Path, dict[str, Any]]) -> None:
    _, folder, description = drafter
    names = []
    for model, width in zip(graphs(folder, description), WIDTHS, strict=True):
        onnx.checker.check_model(model, full_check=True)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 21)] and model.ir_version == 10
        assert {node.op_type for node in model.graph.node} == OPERATORS
        shapes = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.input, *model.graph.output)}
        assert all(dim.HasField("dim_value") for dims in shapes.values() for dim in dims)
        assert [dim.dim_value for dim in shapes["past_key_1"]] == [1, 2, CONTEXT, 32]
        assert [dim.dim_value for dim in shapes["new_value_0"]] == [1, 2, width, 32]
        names.append([node.name for node in model.graph.node])
    assert names[0] == names[1] == names[2], "one calibration serves all widths"


def test_a_target_has_neither_hidden_states_nor_lora(tmp_path: Path) -> None:
    _, source = checkpoint(tmp_path / "model")
    description = write_static(source, tmp_path, (2,), CONTEXT, False)
    (model,) = graphs(tmp_path, description)
    assert not any("lora" in value.name for value in model.graph.input)
    assert [value.name for value in model.graph.output] == ["logits"] + [
        f"new_{part}_{layer}" for layer in range(2) for part in ("key", "value")
    ]
    decoder = StaticDecoder(tmp_path, description)
    decoder.run([1, 2])
    assert decoder.hidden is None and decoder.lora_names == ()


def test_widths_share_their_weights(tmp_path: Path) -> None:
    _, source = checkpoint(tmp_path / "model")
    description = write_static(source, tmp_path / "static", WIDTHS, CONTEXT, True, RANK)
    written = {path.name: path.stat().st_size for path in (tmp_path / "static").iterdir()}
    assert set(written) == {*description["widths"].values(), description["weights"]}
    assert written[description["weights"]] > 4 * 384 * 64 * 2
    assert all(written[name] < 40_000 for name in description["widths"].values())


def sizes(model: Any) -> dict[str, tuple[int, int]]:
    return lora_sizes(read_shape({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}))


def adapter_of(decoder: StaticDecoder, shapes: dict[str, tuple[int, int]], rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    adapter = {}
    for name, (rows, columns) in shapes.items():
        adapter[f"{name}.lora_A"] = rng.normal(scale=rows**-0.5, size=(rows, rank)).astype(np.float32)
        adapter[f"{name}.lora_B"] = rng.normal(scale=0.1, size=(rank, columns)).astype(np.float32)
    assert set(adapter) == set(decoder.lora_names)
    return adapter


def test_lora_equals_merged_weights(drafter: tuple[Any, Path, dict[str, Any]]) -> None:
    """With the graphs' rank and with a smaller one; none again is bit for bit what it was."""
    model, folder, description = drafter
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoder = StaticDecoder(folder, description)
    base, _ = run(decoder)
    shapes = sizes(model)
    for rank in (RANK, 2):
        adapter = adapter_of(decoder, shapes, rank)
        decoder.set_adapter(adapter)
        adapted, _ = run(decoder)
        with torch.no_grad():
            for name in shapes:
                _, layer, part = name.split(".")
                block = "self_attn" if part in "qkvo" else "mlp"
                projection = model.get_submodule(f"model.layers.{layer}.{block}.{part}_proj")
                projection.weight += torch.from_numpy((adapter[f"{name}.lora_A"] @ adapter[f"{name}.lora_B"]).T)
        merged, _ = torch_run(model)
        model.load_state_dict(before)
        assert relative(adapted, merged) <= 1e-4
        assert relative(adapted, base) > 1e-2
    decoder.set_adapter(None)
    assert np.array_equal(run(decoder)[0], base)
    with pytest.raises(OmniDraftError, match=r"^the adapter has rank 5, the static graphs hold 4; use --profile cpu$"):
        decoder.set_adapter(adapter_of(decoder, shapes, 5))
    with pytest.raises(OmniDraftError, match="belongs to another one"):
        decoder.set_adapter({"layers.0.q.lora_A": np.zeros((64, 4), np.float32)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": None}, "yarn"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_it_cannot_express_is_named(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = {**random_model().config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert obstacle(config) is None
    assert reason in str(obstacle({**config, **change}))


def test_every_refusal_is_one_line_with_the_fix(tmp_path: Path) -> None:
    _, source = checkpoint(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    other = json.loads(config.read_text()) | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}

    def refuses(line: str, call: Callable[[], Any]) -> None:
        with pytest.raises(OmniDraftError, match=f"^[^\n]*{line}[^\n]*$"):
            call()

    out = tmp_path / "out"
    refuses("give one or more numbers of rows", lambda: write_static(source, out, (3, 3), CONTEXT, False))
    refuses("choose smaller widths", lambda: write_static(source, out, (1, 97), CONTEXT, False))
    refuses("has 512 positions; choose a context", lambda: write_static(source, out, (1,), 513, False))
    refuses("a rank is for drafters", lambda: write_static(source, out, (1,), CONTEXT, False, 4))
    config.write_text(json.dumps(other))
    refuses(f"{config.parent}: no static graph for it: rope scaling 'dynamic'", lambda: write_static(
        resolve(locate(str(config.parent))), out, (1,), CONTEXT, False))  # fmt: skip
    config.write_text(json.dumps(other | {"rope_parameters": None, "intermediate_size": 96}))
    refuses("they do not match", lambda: write_static(
        resolve(locate(str(config.parent))), out, (1,), CONTEXT, False))  # fmt: skip


@pytest.fixture(scope="module")
def quantized(drafter: tuple[Any, Path, dict[str, Any]]) -> dict[str, Any]:
    _, folder, description = drafter
    samples = [np.random.default_rng(seed).integers(0, 384, 60).tolist() for seed in range(3)]
    return {scheme: quantize_static(folder, description, scheme, samples) for scheme in ("a16w8", "a8w8")}


def scales(model: onnx.ModelProto) -> dict[str, tuple[float, int]]:
    """(scale, zero point) of every value that a graph quantizes, by its name."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {
        node.input[0]: (float(constants[node.input[1]]), int(constants[node.input[2]]))
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    }


@pytest.mark.parametrize("scheme", ["a16w8", "a8w8"])
def test_all_widths_have_one_calibration_and_one_set_of_weights(
    drafter: tuple[Any, Path, dict[str, Any]], quantized: dict[str, Any], scheme: str
) -> None:
    _, folder, _ = drafter
    description = quantized[scheme]
    found = [scales(model) for model in graphs(folder, description)]
    assert len(found[0]) > 50 and found[0] == found[1] == found[2]
    values = {name.removesuffix("_QuantizeLinear_Input"): scale for name, scale in found[0].items()}
    for part in ("key", "value"):
        for layer in range(2):
            assert values[f"past_{part}_{layer}"] == values[f"new_{part}_{layer}"] == values[f"joined_{part}_{layer}"]
    exact, small = ((folder / name).stat().st_size for name in ("weights.bin", description["weights"]))
    assert small < exact / 2
    assert all((folder / name).stat().st_size < 200_000 for name in description["widths"].values())


@pytest.mark.parametrize("scheme", ["a16w8", "a8w8"])
def test_quantized_graphs_are_plain_and_keep_lora(
    drafter: tuple[Any, Path, dict[str, Any]], quantized: dict[str, Any], scheme: str
) -> None:
    _, folder, description = drafter
    for model in graphs(folder, quantized[scheme]):
        assert {node.op_type for node in model.graph.node} == OPERATORS | {"QuantizeLinear", "DequantizeLinear"}
        assert {node.domain for node in model.graph.node} == {""}
    decoder, exact = StaticDecoder(folder, quantized[scheme]), StaticDecoder(folder, description)
    base, _ = run(decoder)
    expected, _ = run(exact)
    assert np.corrcoef(base.ravel(), expected.ravel())[0, 1] > (0.99 if scheme == "a16w8" else 0.95)
    adapter = adapter_of(decoder, sizes(drafter[0]), RANK)
    decoder.set_adapter(adapter)
    exact.set_adapter(adapter)
    adapted, _ = run(decoder)
    wanted, _ = run(exact)
    assert np.corrcoef(adapted.ravel(), wanted.ravel())[0, 1] > np.corrcoef(adapted.ravel(), base.ravel())[0, 1]


def test_quantizing_refuses_in_one_line(drafter: tuple[Any, Path, dict[str, Any]]) -> None:
    _, folder, description = drafter
    with pytest.raises(OmniDraftError, match=r"^scheme 'a4w4' is unknown; choose from a16w8, a8w8$"):
        quantize_static(folder, description, "a4w4", [[1, 2]])
    with pytest.raises(OmniDraftError, match=r"^calibration needs text; [^\n]*$"):
        quantize_static(folder, description, "a16w8", [[]])
