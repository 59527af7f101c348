"""A decoder graph for Llama-architecture checkpoints, built without torch.

The graph has the same inputs and outputs as those of onnxruntime-genai's model builder (see
`build_graph`), and two things that the builder has not: the last hidden state as an output, and
LoRA A/B of every projection as inputs whose defaults, of rank 0, change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from omnidraft.export.quantize import BLOCK, quantize
from omnidraft.runtime.errors import OmniDraftError

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
BITS = {"fp32": None, "int8": 8, "int4": 4}

Weight = Callable[[str], NDArray[np.float32]]


@dataclass(frozen=True)
class LlamaShape:
    """Sizes and constants of a Llama-architecture model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    context: int
    rope_theta: float
    epsilon: float
    tied: bool

    def projection(self, name: str) -> tuple[int, int]:
        """(in, out) of a projection of PROJECTIONS."""
        attention, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q": (self.hidden, attention),
            "k": (self.hidden, kv),
            "v": (self.hidden, kv),
            "o": (attention, self.hidden),
            "gate": (self.hidden, self.intermediate),
            "up": (self.hidden, self.intermediate),
            "down": (self.intermediate, self.hidden),
        }[name]


def obstacle(config: Mapping[str, Any]) -> str | None:
    """Why this builder cannot express the model of a config.json, in a few words; None if it can."""
    architectures = config.get("architectures") or []
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "LlamaForCausalLM" not in architectures:
        return f"architecture {', '.join(architectures) or 'unknown'} is not LlamaForCausalLM"
    if kind != "default":
        return f"rope scaling {kind!r}"
    return odd_layers(config)


def odd_layers(config: Mapping[str, Any]) -> str | None:
    """What the layers have that none of our builders writes, in a few words; None for nothing."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "biases in its projections"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r}"
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return "partial rotary embedding"
    if config.get("quantization_config"):
        return "weights that are quantized already"
    return None


def read_shape(config: Mapping[str, Any]) -> LlamaShape:
    """Sizes from a config.json without `obstacle`, with the defaults of transformers' LlamaConfig."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def lora_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """Projections with LoRA hooks, "layers.{layer}.{projection}" in graph order, with (in, out)."""
    return {f"layers.{layer}.{name}": shape.projection(name) for layer in range(shape.layers) for name in PROJECTIONS}


def build_graph(shape: LlamaShape, weight: Weight, precision: str) -> onnx.ModelProto:
    """The decoder graph of a checkpoint at precision "fp32", "int8" or "int4".

    `weight(name)` returns the float32 tensor that Hugging Face's LlamaForCausalLM calls `name`.
    Inputs: input_ids int64 [1, S]; attention_mask int64 [1, past + S], all ones; past_key_values.{i}.key
    and .value float32 [1, kv_heads, P, head_size]; layers.{i}.{projection}.lora_A [in, rank] and .lora_B
    [rank, out] (optional; y = x W + (x A) B, one rank for all of them). Outputs: logits [1, S, vocabulary];
    hidden_states [1, S, hidden], what the output layer multiplies; present.{i}.key and .value.
    """
    return _Builder(shape, weight, precision).build()


class _Builder:
    def __init__(self, shape: LlamaShape, weight: Weight, precision: str) -> None:
        self.shape, self.weight, self.bits = shape, weight, BITS[precision]
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def build(self) -> onnx.ModelProto:
        shape = self.shape
        table = (shape.vocabulary, shape.hidden)
        self._interface()
        self._lengths()
        self._rotary()
        x = self._node(
            "Gather", [self._tensor("embedding", self._weight("model.embed_tokens.weight", table)), "input_ids"]
        )
        scale = self._tensor("layers.0.norm.scale", self._weight("model.layers.0.input_layernorm.weight", table[1:]))
        y = self._node("SimplifiedLayerNormalization", [x, scale], epsilon=shape.epsilon, axis=-1, stash_type=1)
        for layer in range(shape.layers):
            source = f"model.layers.{layer}"
            y = self._attention(layer, y)
            x, y = self._add_norm(x, y, f"layers.{layer}.mlp_norm", f"{source}.post_attention_layernorm.weight")
            y = self._mlp(layer, y)
            last = layer == shape.layers - 1
            following = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
            norm = "hidden_states" if last else f"layers.{layer + 1}.norm"
            x, y = self._add_norm(x, y, norm, following)
        if shape.tied and self.bits is None:
            self._node("FusedMatMul", [y, "embedding"], "logits", MICROSOFT, transB=1)
        else:
            head = self._weight("model.embed_tokens.weight" if shape.tied else "lm_head.weight", table)
            self._matmul(y, "lm_head", head, "logits")
        graph = helper.make_graph(self.nodes, "llama", self.inputs, self.outputs, self.initializers)
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="omnidraft")

    def _interface(self) -> None:
        shape = self.shape
        for name, length in (("input_ids", "sequence_length"), ("attention_mask", "total_sequence_length")):
            self.inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, [1, length]))
        self._output("logits", [1, "sequence_length", shape.vocabulary])
        self._output("hidden_states", [1, "sequence_length", shape.hidden])
        for layer, part in self._caches():
            past = [1, shape.kv_heads, "past_sequence_length", shape.head_size]
            name = f"past_key_values.{layer}.{part}"
            self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, past))
            self._output(f"present.{layer}.{part}", [1, shape.kv_heads, "present_sequence_length", shape.head_size])

    def _caches(self) -> Iterator[tuple[int, str]]:
        return ((layer, part) for layer in range(self.shape.layers) for part in ("key", "value"))

    def _lengths(self) -> None:
        """GroupQueryAttention's lengths: index of the last position (a row each), and the total length."""
        ones = self._tensor("one", np.array([1], np.int64))
        total = self._node("ReduceSum", ["attention_mask", ones], keepdims=0)
        last = self._node("Sub", [total, ones])
        self._node("Cast", [last], "last_position", to=TensorProto.INT32)
        size = self._node("Shape", ["attention_mask"])
        length = self._node("Gather", [size, self._tensor("mask_axis", np.array(1, np.int64))], axis=0)
        self._node("Cast", [length], "total_length", to=TensorProto.INT32)

    def _rotary(self) -> None:
        half = np.arange(0, self.shape.head_size, 2, dtype=np.float64) / self.shape.head_size
        angles = np.outer(np.arange(self.shape.context, dtype=np.float64), self.shape.rope_theta**-half)
        self._tensor("cos_cache", np.cos(angles).astype(np.float32))
        self._tensor("sin_cache", np.sin(angles).astype(np.float32))

    def _attention(self, layer: int, x: str) -> str:
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        q, k, v = (self._projection(layer, part, x, name) for part, name in zip("qkv", names, strict=True))
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        lengths = ["last_position", "total_length", "cos_cache", "sin_cache"]
        y = f"layers.{layer}.attention"
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, *past, *lengths],
                [y, f"present.{layer}.key", f"present.{layer}.value"],
                name=y,
                domain=MICROSOFT,
                num_heads=self.shape.heads,
                kv_num_heads=self.shape.kv_heads,
                scale=self.shape.head_size**-0.5,
                do_rotary=1,
                rotary_interleaved=0,
            )
        )
        return self._projection(layer, "o", y, f"model.layers.{layer}.self_attn.o_proj.weight")

    def _mlp(self, layer: int, x: str) -> str:
        source = f"model.layers.{layer}.mlp"
        gate = self._projection(layer, "gate", x, f"{source}.gate_proj.weight")
        up = self._projection(layer, "up", x, f"{source}.up_proj.weight")
        active = self._node("Mul", [gate, self._node("Sigmoid", [gate])])
        return self._projection(layer, "down", self._node("Mul", [active, up]), f"{source}.down_proj.weight")

    def _projection(self, layer: int, part: str, x: str, source: str) -> str:
        """x W + (x A) B."""
        name = f"layers.{layer}.{part}"
        rows, columns = self.shape.projection(part)
        base = self._matmul(x, name, self._weight(source, (columns, rows)), f"{name}.base")
        self._hook(f"{name}.lora_A", [rows, "rank"], (rows, 0))
        self._hook(f"{name}.lora_B", ["rank", columns], (0, columns))
        low = self._node("MatMul", [x, f"{name}.lora_A"])
        return self._node("Add", [base, self._node("MatMul", [low, f"{name}.lora_B"])], name)

    def _hook(self, name: str, dims: list[int | str], default: tuple[int, int]) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
        self._tensor(name, np.zeros(default, np.float32))

    def _add_norm(self, x: str, y: str, name: str, source: str) -> tuple[str, str]:
        """(x + y, its RMS normalisation called `name`)."""
        scale = self._tensor(f"{name}.scale", self._weight(source, (self.shape.hidden,)))
        total = f"{name}.residual"
        self.nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [x, y, scale],
                [name, "", "", total],
                name=name,
                domain=MICROSOFT,
                epsilon=self.shape.epsilon,
            )
        )
        return total, name

    def _weight(self, source: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        weight = self.weight(source)
        if weight.shape != shape:
            raise OmniDraftError(f"{source}: shape {weight.shape}, but config.json says {shape}; they do not match")
        return weight

    def _matmul(self, x: str, name: str, weight: NDArray[np.float32], output: str) -> str:
        """x W for a weight stored as [out, in]."""
        if self.bits is None:
            return self._node("FusedMatMul", [x, self._tensor(f"{name}.weight", weight)], output, MICROSOFT, transB=1)
        packed = quantize(weight, self.bits)
        inputs = [x, self._tensor(f"{name}.codes", packed.codes), self._tensor(f"{name}.scales", packed.scales)]
        if packed.zero_points is not None:
            inputs.append(self._tensor(f"{name}.zeros", packed.zero_points))
        sizes = {"K": weight.shape[1], "N": weight.shape[0], "bits": self.bits, "block_size": BLOCK}
        return self._node("MatMulNBits", inputs, output, MICROSOFT, **sizes, accuracy_level=4)

    def _node(self, kind: str, inputs: list[str], output: str = "", domain: str = "", **attributes: Any) -> str:
        output = output or f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def _output(self, name: str, dims: list[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))

    def _tensor(self, name: str, array: NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name
