"""The graphs that a drafter learns with on the device: its loss, and a whole training step, without torch.

Only standard operators of opset 17, so any ONNX Runtime runs them, in a browser too. The backward pass is written
by hand; tests compare it with torch's and with finite differences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omnidraft.export.llama_graph import PROJECTIONS, LlamaShape, Weight, lora_sizes
from omnidraft.export.onnx_writer import FLOAT, GraphWriter, WeightsFile
from omnidraft.export.training_model import TrainedModel

OPSET, IR_VERSION = 17, 8
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # AdamW (Loshchilov & Hutter 2019), torch's defaults
FILES = {"loss": "loss.onnx", "step": "step.onnx", "weights": "weights.bin"}
LOSS, STEP, WEIGHTS = FILES.values()


def write_training_graphs(shape: LlamaShape, weight: Weight, folder: Path) -> None:
    """Write loss.onnx, step.onnx and weights.bin, which both share, of a Llama-architecture drafter.

    Inputs of both: input_ids int64 [B, T], rows that begin at position 0 with padding behind their end; and what
    K positions are to learn (`adapters/batch.py` makes it): positions int64 [K], unique, in the flattened rows;
    ids int64 [K, M], logp and on float [K, M], rest_logp float [K, 1], labels int64 [K, 1], w_kl, w_nll and direct
    float [K, 1], unmapped float [V].

    With q = softmax(logits + direct · unmapped) and a last bin for all that is not in ids, the loss is
    Σ_k w_kl · KL(q ‖ p) + w_nll · (-log q(label)): OmniDraft (arXiv 2507.02659), section 3.2, and DESIGN.md section 6.

    loss.onnx takes layers.{i}.{projection}.lora_A [in, rank] and .lora_B [rank, out] and gives loss.
    step.onnx takes all of them in one vector, in the order of `lora_sizes`, A before B, with AdamW's moments:
    lora, moment_1, moment_2 float [N], correction float [2] (1 - βᵗ of both), rate float [1], clip float [1]; it gives
    loss, grad (before clipping to that norm), and lora_out, moment_1_out, moment_2_out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = WeightsFile(folder / WEIGHTS)
    _write_weights(shape, weight, file)
    for name in (LOSS, STEP):
        writer = GraphWriter(file)
        model = TrainedModel(writer, shape)
        (_step if name == STEP else _loss)(writer, shape, model)
        writer.save(folder / name, OPSET, IR_VERSION)


def _write_weights(shape: LlamaShape, weight: Weight, file: WeightsFile) -> None:
    file.add("embedding", weight("model.embed_tokens.weight"))
    if not shape.tied:
        file.add("head", weight("lm_head.weight"))
    for layer in range(shape.layers):
        source = f"model.layers.{layer}"
        file.add(f"layers.{layer}.norm", weight(f"{source}.input_layernorm.weight"))
        file.add(f"layers.{layer}.mlp_norm", weight(f"{source}.post_attention_layernorm.weight"))
        for part in PROJECTIONS:
            room = "self_attn" if part in "qkvo" else "mlp"
            file.add(f"layers.{layer}.{part}", weight(f"{source}.{room}.{part}_proj.weight"))
    file.add("norm", weight("model.norm.weight"))
    half = np.arange(0, shape.head_size, 2, dtype=np.float64) / shape.head_size
    angles = np.outer(np.arange(shape.context, dtype=np.float64), shape.rope_theta**-half)
    for name, function in (("cos", np.cos), ("sin", np.sin)):
        file.add(name, function(np.concatenate([angles, angles], 1)).astype(np.float32))


def _loss(g: GraphWriter, shape: LlamaShape, model: TrainedModel) -> None:
    for name, (rows, columns) in lora_sizes(shape).items():
        a = g.input(f"{name}.lora_A", FLOAT, rows, "rank")
        model.lora[name] = a, g.input(f"{name}.lora_B", FLOAT, "rank", columns)
    model.forward()
    g.output("loss", FLOAT)


def _step(g: GraphWriter, shape: LlamaShape, model: TrainedModel) -> None:
    sizes = [size for pair in lora_sizes(shape).values() for size in pair]
    vectors = [g.input(name, FLOAT, "N") for name in ("lora", "moment_1", "moment_2")]
    correction, rate, clip = (g.input(n, FLOAT, size) for n, size in (("correction", 2), ("rate", 1), ("clip", 1)))
    rank = g.op("Div", g.op("Shape", "lora"), g.ints(sum(sizes)))
    parts = iter(g.split("lora", g.op("Mul", rank, g.ints(*sizes)), len(sizes), 0))
    for name, (rows, columns) in lora_sizes(shape).items():
        a = g.op("Reshape", next(parts), g.ints(rows, -1))
        model.lora[name] = a, g.op("Reshape", next(parts), g.ints(-1, columns))
    model.forward()
    gradients = model.backward()
    flat = [g.op("Reshape", part, g.ints(-1)) for name in model.lora for part in gradients[name]]
    g.op("Concat", *flat, axis=0, name="grad")
    _adamw(g, vectors, correction, rate, clip)
    g.output("loss", FLOAT)
    for name in ("grad", "lora_out", "moment_1_out", "moment_2_out"):
        g.output(name, FLOAT, "N")


def _adamw(g: GraphWriter, vectors: list[str], correction: str, rate: str, clip: str) -> None:
    """The gradient clipped to a norm, the moments, and the step with decoupled weight decay."""
    lora, moment_1, moment_2 = vectors
    norm = g.op("Sqrt", g.op("ReduceSum", g.op("Mul", "grad", "grad"), keepdims=1))
    share = g.op("Min", g.number(1.0), g.op("Div", clip, g.op("Add", norm, g.number(1e-6))))
    grad = g.op("Mul", "grad", share)
    moments = []
    for name, old, new, beta in (("1", moment_1, grad, BETAS[0]), ("2", moment_2, g.op("Mul", grad, grad), BETAS[1])):
        kept, added = g.op("Mul", old, g.number(beta)), g.op("Mul", new, g.number(1 - beta))
        moments.append(g.op("Add", kept, added, name=f"moment_{name}_out"))
    first, second = g.split(correction, g.ints(1, 1), 2, 0)
    root = g.op("Add", g.op("Sqrt", g.op("Div", moments[1], second)), g.number(EPSILON))
    change = g.op("Add", g.op("Div", g.op("Div", moments[0], first), root), g.op("Mul", lora, g.number(DECAY)))
    g.op("Sub", lora, g.op("Mul", rate, change), name="lora_out")
