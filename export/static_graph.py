"""Fixed-shape decoder graphs of plain operators, for toolchains that compile a graph ahead of time (NPUs, NNAPI).

Written by hand over the checkpoint rather than traced from transformers: torch is not needed, nodes have the same
names in the graph of every width (so that one calibration serves all), and nothing depends on what a tracer folds.
Tests compare the graphs with transformers itself.

The host owns the past. A graph gets all C slots of it and the slot that every row takes (`order`), so a key stands in
the slot of its position however many rows a pass has. A window that is right-aligned instead moves every key when a
pass has another number of rows, and sums are then rounded in another order: drafting would change the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from omnidraft.export.drafter import Weights
from omnidraft.export.llama_graph import PROJECTIONS, LlamaShape, lora_sizes, odd_layers, read_shape
from omnidraft.export.onnx_writer import FLOAT, GraphWriter, WeightsFile
from omnidraft.export.sources import Source
from omnidraft.runtime.errors import OmniDraftError

OPSET, IR_VERSION = 21, 10
INT32 = TensorProto.INT32
WEIGHTS = "weights.bin"
MASKED = -1e4  # exp(MASKED) is 0 in float32, and MASKED is a number in float16
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear")
NORM, LORA = ".rms_", ".lora_"  # in the names of nodes that have to be told apart when the graph is quantized


@dataclass(frozen=True)
class StaticShape:
    """A decoder's sizes, and what its architecture has beyond Llama's."""

    base: LlamaShape
    biases: bool  # of q, k and v (Qwen2)
    head_norms: bool  # of q and k (Qwen3)
    rope_factor: float  # positions are divided by it


def obstacle(config: Mapping[str, Any]) -> str | None:
    """Why these graphs cannot express the model of a config.json, in a few words; None if they can."""
    architecture = (config.get("architectures") or ["unknown"])[0]
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture} is not one of {', '.join(ARCHITECTURES)}"
    if kind not in ROPES:
        return f"rope scaling {kind!r} is not one of {', '.join(ROPES)}"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
        return "sliding-window attention"
    return odd_layers(config)


def read_static_shape(config: Mapping[str, Any]) -> StaticShape:
    """Sizes from a config.json without `obstacle`."""
    architecture, rope = config["architectures"][0], _rope(config)
    if architecture == "Qwen3ForCausalLM" and not config.get("head_dim"):
        config = {**config, "head_dim": 128}  # transformers' default for this architecture alone
    return StaticShape(
        read_shape(config),
        biases=architecture == "Qwen2ForCausalLM",
        head_norms=architecture == "Qwen3ForCausalLM",
        rope_factor=float(rope.get("factor") or 1.0),
    )


def write_static(
    source: Source, folder: Path, widths: Sequence[int], context: int, drafter: bool, rank: int = 0
) -> dict[str, Any]:
    """Write s{S}.onnx for each width S, and the weights.bin that they share. Returns what the runtime must know.

    Inputs, with S rows, C = `context` slots and D = head size: input_ids int32 [1, S]; order int32 [C], the row
    that a slot takes, j for row j of this pass and i - C for slot i of the past; attention_mask float32
    [1, 1, S, C], added to the scores; cos and sin float32 [1, 1, S, D]; past_key_{i}, past_value_{i} float32
    [1, kv_heads, C, D]. Outputs: logits [1, S, vocabulary]; new_key_{i}, new_value_{i} [1, kv_heads, S, D]; for a
    drafter hidden_states [1, S, hidden]. A drafter with a `rank` takes layers.{i}.{projection}.lora_A [in, rank] and
    .lora_B [rank, out] (optional, zero by default).

    Raises OmniDraftError for a checkpoint that cannot be expressed, or widths and a context that do not fit it.
    """
    check_static(source, widths, context, drafter, rank)
    shape = read_static_shape(source.config)
    folder.mkdir(parents=True, exist_ok=True)
    file = WeightsFile(folder / WEIGHTS)
    _write_weights(shape, Weights(source), file, rank)
    files = {}
    for width in sorted(widths):
        writer = GraphWriter(file)
        StaticModel(writer, shape, width, context, drafter, rank).build()
        files[str(width)] = f"s{width}.onnx"
        writer.save(folder / files[str(width)], OPSET, IR_VERSION)
    base = shape.base
    return {
        "context": context,
        "widths": files,
        "weights": WEIGHTS,
        "layers": base.layers,
        "kv_heads": base.kv_heads,
        "head_size": base.head_size,
        "hidden": base.hidden,
        "vocabulary": base.vocabulary,
        "rope_theta": base.rope_theta,
        "rope_factor": shape.rope_factor,
        "masked": MASKED,
        "rank": rank,
    }


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def check_static(source: Source, widths: Sequence[int], context: int, drafter: bool, rank: int) -> None:
    """Raise OmniDraftError for what `write_static` cannot write."""
    hindrance = obstacle(source.config)
    if hindrance is not None:
        raise OmniDraftError(f"{source.folder}: no static graph for it: {hindrance}; use the cpu profile")
    if not widths or len(set(widths)) != len(widths) or min(widths) < 1:
        raise OmniDraftError(f"widths {list(widths)}: give one or more numbers of rows, each once, as in 1,3,64")
    if max(widths) > context:
        raise OmniDraftError(f"a width of {max(widths)} does not fit a context of {context}; choose smaller widths")
    if context > source.context:
        raise OmniDraftError(f"{source.folder}: has {source.context} positions; choose a context up to that")
    if rank and not drafter:
        raise OmniDraftError("a rank is for drafters; targets do not learn")


def _write_weights(shape: StaticShape, weight: Weights, file: WeightsFile, rank: int) -> None:
    """Matrices are stored as [in, out], which is what MatMul takes.

    A tied output layer is written beside the embedding: the two are quantized differently.
    """
    base = shape.base

    def add(name: str, source: str, *dims: int) -> None:
        """A vector, or a matrix that is kept as [out, in] in the checkpoint."""
        array = _tensor(weight, source, *dims)
        file.add(name, np.ascontiguousarray(array.T))

    file.add("embedding", _tensor(weight, "model.embed_tokens.weight", base.vocabulary, base.hidden))
    for layer in range(base.layers):
        source = f"model.layers.{layer}"
        add(f"layers.{layer}.norm", f"{source}.input_layernorm.weight", base.hidden)
        add(f"layers.{layer}.mlp_norm", f"{source}.post_attention_layernorm.weight", base.hidden)
        for part in PROJECTIONS:
            room = "self_attn" if part in "qkvo" else "mlp"
            rows, columns = base.projection(part)
            add(f"layers.{layer}.{part}", f"{source}.{room}.{part}_proj.weight", columns, rows)
            if shape.biases and part in "qkv":
                add(f"layers.{layer}.{part}.bias", f"{source}.self_attn.{part}_proj.bias", columns)
            if shape.head_norms and part in "qk":
                add(f"layers.{layer}.{part}_norm", f"{source}.self_attn.{part}_norm.weight", base.head_size)
    add("norm", "model.norm.weight", base.hidden)
    add("head", "model.embed_tokens.weight" if base.tied else "lm_head.weight", base.vocabulary, base.hidden)
    if rank:
        for name, (rows, columns) in lora_sizes(base).items():
            file.add(f"{name}.lora_A", np.zeros((rows, rank), np.float32))
            file.add(f"{name}.lora_B", np.zeros((rank, columns), np.float32))


def _tensor(weight: Weights, name: str, *dims: int) -> NDArray[np.float32]:
    found = weight(name)
    if found.shape != dims:
        raise OmniDraftError(f"{name}: shape {found.shape}, but config.json says {dims}; they do not match")
    return found


class StaticModel:
    """The graph of one width, node by node."""

    def __init__(
        self, writer: GraphWriter, shape: StaticShape, width: int, context: int, drafter: bool, rank: int
    ) -> None:
        self.g, self.shape, self.base = writer, shape, shape.base
        self.width, self.context, self.drafter, self.rank = width, context, drafter, rank

    def build(self) -> None:
        """All of it, inputs and outputs included."""
        g, base = self.g, self.base
        self._interface()
        x = g.op("Gather", g.weight("embedding"), "input_ids")
        for layer in range(base.layers):
            name = f"layers.{layer}"
            x = g.op("Add", x, self._attention(layer, self._norm(x, f"{name}.norm")))
            x = g.op("Add", x, self._mlp(name, self._norm(x, f"{name}.mlp_norm")))
        hidden = self._norm(x, "norm", name="hidden_states" if self.drafter else "")
        g.op("MatMul", hidden, g.weight("head"), name="logits")

    def _interface(self) -> None:
        g, base, width, context = self.g, self.base, self.width, self.context
        g.input("input_ids", INT32, 1, width)
        order = g.input("order", INT32, context)
        # A real addition: Qualcomm's HTP simulator misreads an index that comes straight from an input (QAIRT 2.51).
        self._order = g.op("Add", order, g.constant(np.array([context], np.int32)), name="rows")
        g.input("attention_mask", FLOAT, 1, 1, width, context)
        for name in ("cos", "sin"):
            g.input(name, FLOAT, 1, 1, width, base.head_size)
        g.output("logits", FLOAT, 1, width, base.vocabulary)
        if self.drafter:
            g.output("hidden_states", FLOAT, 1, width, base.hidden)
        for layer in range(base.layers):
            for part in ("key", "value"):
                g.input(f"past_{part}_{layer}", FLOAT, 1, base.kv_heads, context, base.head_size)
                g.output(f"new_{part}_{layer}", FLOAT, 1, base.kv_heads, width, base.head_size)
        if self.rank:
            for name, (rows, columns) in lora_sizes(base).items():
                g.input(g.weight(f"{name}.lora_A"), FLOAT, rows, self.rank)
                g.input(g.weight(f"{name}.lora_B"), FLOAT, self.rank, columns)

    def _attention(self, layer: int, x: str) -> str:
        """Heads of a group stand in the rows of one matrix, so that keys and values are not repeated."""
        g, base, width, name = self.g, self.base, self.width, f"layers.{layer}"
        grouped = base.heads != base.kv_heads
        q = self._rotate(self._heads(f"{name}.q", x, base.heads))
        q = g.op("Mul", q, g.number(base.head_size**-0.5))
        self._rotate(self._heads(f"{name}.k", x, base.kv_heads), name=f"new_key_{layer}")
        self._heads(f"{name}.v", x, base.kv_heads, name=f"new_value_{layer}")
        if grouped:
            rows = base.heads // base.kv_heads * width
            q = g.op("Reshape", q, g.ints(1, base.kv_heads, rows, base.head_size))
        keys = g.op("Transpose", self._slots("key", layer), perm=[0, 1, 3, 2])
        scores = g.op("MatMul", q, keys, name=f"{name}.scores")
        if grouped:
            scores = g.op("Reshape", scores, g.ints(1, base.heads, width, self.context), name=f"{name}.head_scores")
        scores = g.op("Add", scores, "attention_mask", name=f"{name}.masked")
        weights = g.op("Softmax", scores, axis=-1, name=f"{name}.weights")
        if grouped:
            weights = g.op("Reshape", weights, g.ints(1, base.kv_heads, rows, self.context))
        y = g.op("MatMul", weights, self._slots("value", layer))
        if grouped:
            y = g.op("Reshape", y, g.ints(1, base.heads, width, base.head_size))
        y = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.ints(1, width, base.heads * base.head_size))
        return self._linear(f"{name}.o", y)

    def _mlp(self, name: str, x: str) -> str:
        g = self.g
        gate, up = self._linear(f"{name}.gate", x), self._linear(f"{name}.up", x)
        active = g.op("Mul", gate, g.op("Sigmoid", gate))
        return self._linear(f"{name}.down", g.op("Mul", active, up))

    def _heads(self, projection: str, x: str, heads: int, name: str = "") -> str:
        """A projection as [1, heads, S, D]."""
        g, base = self.g, self.base
        y = g.op("Reshape", self._linear(projection, x), g.ints(1, self.width, heads, base.head_size))
        if self.shape.head_norms and projection[-1] in "qk":
            y = self._norm(y, f"{projection}_norm")
        return g.op("Transpose", y, perm=[0, 2, 1, 3], name=name)

    def _slots(self, part: str, layer: int) -> str:
        """Past and new rows, each in the slot of its position."""
        g = self.g
        joined = g.op("Concat", f"past_{part}_{layer}", f"new_{part}_{layer}", axis=2, name=f"joined_{part}_{layer}")
        return g.op("Gather", joined, self._order, axis=2, name=f"slots_{part}_{layer}")

    def _linear(self, name: str, x: str) -> str:
        """x W + bias + (x A) B."""
        g = self.g
        y = g.op("MatMul", x, g.weight(name))
        if self.shape.biases and name.rsplit(".", 1)[1] in "qkv":
            y = g.op("Add", y, g.weight(f"{name}.bias"))
        if self.rank:
            low = g.op("MatMul", x, f"{name}.lora_A", name=f"{name}{LORA}low")
            change = g.op("MatMul", low, f"{name}.lora_B", name=f"{name}{LORA}change")
            y = g.op("Add", y, change, name=f"{name}{LORA}sum")
        return y

    def _norm(self, x: str, weight: str, name: str = "") -> str:
        """RMS normalisation along the last axis; as one operator it is younger than the opset that phones have."""
        g = self.g
        squares = g.op("Mul", x, x, name=f"{weight}{NORM}squares")
        mean = g.op("ReduceMean", squares, g.ints(-1), keepdims=1, name=f"{weight}{NORM}mean")
        shifted = g.op("Add", mean, g.number(self.base.epsilon), name=f"{weight}{NORM}shifted")
        root = g.op("Sqrt", shifted, name=f"{weight}{NORM}root")
        return g.op("Mul", g.op("Div", x, root, name=f"{weight}{NORM}unit"), g.weight(weight), name=name)

    def _rotate(self, x: str, name: str = "") -> str:
        g, half = self.g, self.base.head_size // 2
        first, second = g.split(x, g.ints(half, half), 2, -1)
        turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
        return g.op("Add", g.op("Mul", x, "cos"), g.op("Mul", turned, "sin"), name=name)
