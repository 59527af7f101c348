"""Forward and backward pass of a Llama-architecture drafter with LoRA, node by node (see `training_graph`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from omnidraft.export.llama_graph import LlamaShape
from omnidraft.export.onnx_writer import FLOAT, INT64, GraphWriter

TINY = 1e-30  # keeps log(0) finite; below any probability that matters
FAR = -1e9  # a masked score
REST = 1e-6  # keeps the mass of the last bin positive whatever the rounding


@dataclass
class Layer:
    """What the forward pass of one layer keeps for the backward pass: names of values."""

    kept: dict[str, str] = field(default_factory=dict)
    low: dict[str, str] = field(default_factory=dict)  # x A of each projection


class TrainedModel:
    """Forward and backward pass; values of positions are flat, [B · T, ...]."""

    def __init__(self, writer: GraphWriter, shape: LlamaShape) -> None:
        self.g, self.shape = writer, shape
        self.lora: dict[str, tuple[str, str]] = {}
        self._gradients: dict[str, tuple[str, str]] = {}
        self._layers: list[Layer] = []
        self._one = writer.number(1.0)

    def forward(self) -> None:
        """Up to the loss."""
        g, shape = self.g, self.shape
        g.input("input_ids", INT64, "B", "T")
        self._geometry()
        x = g.op("Reshape", g.op("Gather", g.weight("embedding"), "input_ids"), g.ints(-1, shape.hidden))
        for layer in range(shape.layers):
            x = self._layer(layer, x)
        self._last = x
        self._hidden, self._scale = self._norm(x, "norm")
        self._output_loss()

    def backward(self) -> dict[str, tuple[str, str]]:
        """Gradients of A and B of each projection."""
        g, shape = self.g, self.shape
        picked = g.op("Gemm", self._logit_gradient(), self._head())
        empty = g.op("Mul", self._hidden, g.number(0.0))
        spread = g.op("ScatterND", empty, g.op("Unsqueeze", "positions", g.ints(1)), picked)
        dx = self._norm_back(spread, self._last, self._scale, "norm")
        for layer in reversed(range(shape.layers)):
            dx = self._layer_back(layer, dx)
        return self._gradients

    def _geometry(self) -> None:
        """Shapes of heads, the rotary tables [T, D] and the causal mask [T, T] for these rows."""
        g, shape = self.g, self.shape
        group = shape.heads // shape.kv_heads
        rows = g.op("Shape", "input_ids")
        self._heads = g.op("Concat", rows, g.ints(shape.kv_heads, group, shape.head_size), axis=0)
        self._kv_heads = g.op("Concat", rows, g.ints(shape.kv_heads, 1, shape.head_size), axis=0)
        length = g.op("Gather", rows, g.ints(1))
        self._cos, self._sin = (g.op("Slice", g.weight(name), g.ints(0), length, g.ints(0)) for name in ("cos", "sin"))
        zero, one = g.constant(np.array(0, np.int64)), g.constant(np.array(1, np.int64))
        at = g.op("Range", zero, g.op("Squeeze", length), one)
        later = g.op("Less", g.op("Unsqueeze", at, g.ints(1)), g.op("Unsqueeze", at, g.ints(0)))
        self._mask = g.op("Where", later, g.number(FAR), g.number(0.0))

    def _layer(self, index: int, x: str) -> str:
        g, shape, layer = self.g, self.shape, Layer()
        kept, name = layer.kept, f"layers.{index}"
        self._layers.append(layer)
        kept["x"] = x
        kept["h"], kept["scale"] = self._norm(x, f"{name}.norm")
        q, k, v = (self._linear(layer, index, part, kept["h"]) for part in "qkv")
        score = g.number(shape.head_size**-0.5)
        kept["q"] = g.op("Mul", self._rotate(self._split_heads(q, self._heads)), score)
        kept["k"] = self._repeat(self._rotate(self._split_heads(k, self._kv_heads)))
        kept["v"] = self._repeat(self._split_heads(v, self._kv_heads))
        scores = g.op("Add", g.op("MatMul", kept["q"], self._turn(kept["k"])), self._mask)
        kept["attention"] = g.op("Softmax", scores, axis=-1)
        kept["c"] = self._join_heads(g.op("MatMul", kept["attention"], kept["v"]), shape.heads * shape.head_size)
        kept["y"] = y = g.op("Add", x, self._linear(layer, index, "o", kept["c"]))
        kept["mlp_h"], kept["mlp_scale"] = self._norm(y, f"{name}.mlp_norm")
        gate = self._linear(layer, index, "gate", kept["mlp_h"])
        kept["up"] = self._linear(layer, index, "up", kept["mlp_h"])
        kept["sigmoid"] = g.op("Sigmoid", gate)
        kept["silu"] = g.op("Mul", gate, kept["sigmoid"])
        kept["m"] = g.op("Mul", kept["silu"], kept["up"])
        return g.op("Add", y, self._linear(layer, index, "down", kept["m"]))

    def _layer_back(self, index: int, dx: str) -> str:
        """The gradient of the layer's input; layer 0 needs none, nothing below it learns."""
        g, shape, layer = self.g, self.shape, self._layers[index]
        kept, name, lowest = layer.kept, f"layers.{index}", index == 0
        dm = self._linear_back(layer, index, "down", dx, kept["m"])
        d_up = g.op("Mul", dm, kept["silu"])
        inner = g.op("Mul", kept["silu"], g.op("Sub", self._one, kept["sigmoid"]))
        d_gate = g.op("Mul", g.op("Mul", dm, kept["up"]), g.op("Add", kept["sigmoid"], inner))
        dh = g.op(
            "Add",
            self._linear_back(layer, index, "up", d_up, kept["mlp_h"]),
            self._linear_back(layer, index, "gate", d_gate, kept["mlp_h"]),
        )
        dy = g.op("Add", dx, self._norm_back(dh, kept["y"], kept["mlp_scale"], f"{name}.mlp_norm"))
        dc = self._split_heads(self._linear_back(layer, index, "o", dy, kept["c"]), self._heads)
        dv = self._reduce(g.op("MatMul", self._turn(kept["attention"]), dc))
        da = g.op("Mul", g.op("MatMul", dc, self._turn(kept["v"])), kept["attention"])
        total = g.op("ReduceSum", da, g.ints(-1), keepdims=1)
        ds = g.op("Sub", da, g.op("Mul", kept["attention"], total))
        score = g.number(shape.head_size**-0.5)
        dq = self._rotate_back(g.op("Mul", g.op("MatMul", ds, kept["k"]), score))
        dk = self._rotate_back(self._reduce(g.op("MatMul", self._turn(ds), kept["q"])))
        attention, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        parts = [
            self._linear_back(layer, index, part, self._join_heads(d, width), kept["h"], inner=not lowest)
            for part, d, width in (("q", dq, attention), ("k", dk, kv), ("v", dv, kv))
        ]
        if lowest:
            return ""
        dh = g.op("Sum", *parts)
        return g.op("Add", dy, self._norm_back(dh, kept["x"], kept["scale"], f"{name}.norm"))

    def _linear(self, layer: Layer, index: int, part: str, x: str) -> str:
        """x W + (x A) B."""
        name = f"layers.{index}.{part}"
        a, b = self.lora[name]
        layer.low[part] = low = self.g.op("MatMul", x, a)
        return self.g.op("Gemm", low, b, self.g.op("Gemm", x, self.g.weight(name), transB=1))

    def _linear_back(self, layer: Layer, index: int, part: str, dy: str, x: str, inner: bool = True) -> str:
        """Keeps the gradients of A and B; returns that of x, if it is wanted (`inner`)."""
        g, name = self.g, f"layers.{index}.{part}"
        a, b = self.lora[name]
        d_low = g.op("Gemm", dy, b, transB=1)
        self._gradients[name] = g.op("Gemm", x, d_low, transA=1), g.op("Gemm", layer.low[part], dy, transA=1)
        if not inner:
            return ""
        return g.op("Gemm", d_low, a, g.op("Gemm", dy, g.weight(name)), transB=1)

    def _norm(self, x: str, name: str) -> tuple[str, str]:
        """RMS normalisation, and 1 / RMS."""
        g = self.g
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
        scale = g.op("Reciprocal", g.op("Sqrt", g.op("Add", mean, g.number(self.shape.epsilon))))
        return g.op("Mul", g.op("Mul", x, scale), g.weight(name)), scale

    def _norm_back(self, dy: str, x: str, scale: str, name: str) -> str:
        g = self.g
        dn = g.op("Mul", dy, g.weight(name))
        mean = g.op("ReduceMean", g.op("Mul", dn, x), axes=[-1], keepdims=1)
        along = g.op("Mul", x, g.op("Mul", g.op("Mul", scale, scale), mean))
        return g.op("Mul", scale, g.op("Sub", dn, along))

    def _rotate(self, x: str) -> str:
        g = self.g
        return g.op("Add", g.op("Mul", x, self._cos), g.op("Mul", self._half(x, False), self._sin))

    def _rotate_back(self, d: str) -> str:
        g = self.g
        return g.op("Add", g.op("Mul", d, self._cos), self._half(g.op("Mul", d, self._sin), True))

    def _half(self, x: str, transposed: bool) -> str:
        """(-x₂, x₁) of the two halves of the last axis, or what undoes it."""
        g, half = self.g, self.shape.head_size // 2
        first, second = g.split(x, g.ints(half, half), 2, -1)
        pair = (second, g.op("Neg", first)) if transposed else (g.op("Neg", second), first)
        return g.op("Concat", *pair, axis=-1)

    def _split_heads(self, x: str, shape: str) -> str:
        """[B · T, heads · D] -> [B, kv_heads, group, T, D]."""
        return self.g.op("Transpose", self.g.op("Reshape", x, shape), perm=[0, 2, 3, 1, 4])

    def _join_heads(self, x: str, width: int) -> str:
        return self.g.op("Reshape", self.g.op("Transpose", x, perm=[0, 3, 1, 2, 4]), self.g.ints(-1, width))

    def _turn(self, x: str) -> str:
        return self.g.op("Transpose", x, perm=[0, 1, 2, 4, 3])

    def _repeat(self, x: str) -> str:
        """Keys or values for every head of a group; onnxruntime-training cannot differentiate a broadcast here."""
        group = self.shape.heads // self.shape.kv_heads
        return x if group == 1 else self.g.op("Concat", *[x] * group, axis=2)

    def _reduce(self, d: str) -> str:
        grouped = self.shape.heads != self.shape.kv_heads
        return self.g.op("ReduceSum", d, self.g.ints(2), keepdims=1) if grouped else d

    def _head(self) -> str:
        return self.g.weight("embedding" if self.shape.tied else "head")

    def _output_loss(self) -> None:
        g = self.g
        for name, kind, width in (
            ("positions", INT64, None), ("ids", INT64, "M"), ("logp", FLOAT, "M"), ("on", FLOAT, "M"),
            ("rest_logp", FLOAT, 1), ("labels", INT64, 1), ("w_kl", FLOAT, 1), ("w_nll", FLOAT, 1),
            ("direct", FLOAT, 1),
        ):  # fmt: skip
            g.input(name, kind, "K", *([] if width is None else [width]))
        g.input("unmapped", FLOAT, self.shape.vocabulary)
        logits = g.op("Gemm", g.op("Gather", self._hidden, "positions"), self._head(), transB=1)
        masked = g.op("Add", logits, g.op("Mul", "direct", "unmapped"))
        self._q = g.op("Softmax", masked, axis=-1)
        self._known = g.op("Mul", g.op("GatherElements", self._q, "ids", axis=1), "on")
        total = g.op("ReduceSum", self._known, g.ints(1), keepdims=1)
        rest = g.op("Sub", g.number(1.0 + REST), total)
        tiny = g.number(TINY)
        self._ratio = g.op("Sub", g.op("Log", g.op("Add", self._known, tiny)), "logp")
        self._rest_ratio = g.op("Sub", g.op("Log", rest), "rest_logp")
        known_kl = g.op("ReduceSum", g.op("Mul", self._known, self._ratio), g.ints(1), keepdims=1)
        kl = g.op("Add", known_kl, g.op("Mul", rest, self._rest_ratio))
        said = g.op("Log", g.op("Add", g.op("GatherElements", self._q, "labels", axis=1), tiny))
        both = g.op("Sub", g.op("Mul", "w_kl", kl), g.op("Mul", "w_nll", said))
        g.op("ReduceSum", both, keepdims=0, name="loss")

    def _logit_gradient(self) -> str:
        """[K, V]: q (g - Σ q g) of the KL, g being ratio - ratio of the rest, and q - 1[label] of the NLL, weighted."""
        g = self.g
        slope = g.op("Mul", self._known, g.op("Sub", self._ratio, self._rest_ratio))
        pull = g.op("Mul", "w_kl", slope)
        even = g.op("Sub", "w_nll", g.op("ReduceSum", pull, g.ints(1), keepdims=1))
        where = g.op("Concat", "ids", "labels", axis=1)
        what = g.op("Concat", pull, g.op("Neg", "w_nll"), axis=1)
        return g.op("ScatterElements", g.op("Mul", self._q, even), where, what, axis=1, reduction="add")
