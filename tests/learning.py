"""What tests of learning share: batches of random numbers, a loss written in torch, graphs of small drafters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_model

from omnidraft.adapters.layout import Layout
from omnidraft.adapters.ort_training import OrtTrainingTrainer
from omnidraft.adapters.trainer import Trainer
from omnidraft.export.llama_graph import lora_sizes, read_shape
from omnidraft.export.training_graph import write_training_graphs
from omnidraft.tools.setup_training import facts, unsupported

RANK, RATE = 4, 1e-3
VOCABULARY = 300
WHY_NOT = unsupported(facts(Path(sys.executable)))
needs_package = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "no grouping, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one kv head, odd sizes": {"num_key_value_heads": 1, "hidden_size": 72, "vocab_size": 401, "rms_norm_eps": 1e-4},
}


def write_graphs(folder: Path, **overrides: Any) -> tuple[Any, Layout]:
    """(torch model, layout) of a random drafter whose training graphs are then in the folder."""
    model = random_model(**{"initializer_range": 0.1, **overrides})
    shape = read_shape({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    write_training_graphs(shape, weights.__getitem__, folder)
    return model, Layout({name: list(size) for name, size in lora_sizes(shape).items()})


def random_batch(vocabulary: int, rows: int = 3, length: int = 11, k: int = 9, m: int = 5, seed: int = 0) -> Any:
    """Feeds with every kind of position: KL with and without a mask, NLL, both, padding in ids."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(m + 1), k).astype(np.float32)
    on = np.ones((k, m), np.float32)
    on[::3, -1] = 0
    unmapped = np.where(rng.random(vocabulary) < 0.3, -1e9, 0.0).astype(np.float32)
    mapped = np.flatnonzero(unmapped == 0)
    return {
        "input_ids": rng.integers(0, vocabulary, (rows, length)),
        "positions": rng.permutation(rows * length)[:k],
        "ids": np.stack([rng.permutation(mapped)[:m] for _ in range(k)]),
        "logp": np.log(p[:, :m]),
        "on": on,
        "rest_logp": np.log(p[:, m:] + 1e-6),
        "labels": rng.choice(mapped, (k, 1)),
        "w_kl": np.where(np.arange(k)[:, None] % 4 == 1, 0.0, 1.0 / k).astype(np.float32),
        "w_nll": np.where(np.arange(k)[:, None] % 4 == 0, 0.0, 0.2 / k).astype(np.float32),
        "direct": (np.arange(k)[:, None] % 2).astype(np.float32),
        "unmapped": unmapped,
    }


def random_lora(layout: Layout, rank: int, seed: int = 1) -> np.ndarray:
    """A vector with B away from zero, so that A has a gradient too."""
    rng = np.random.default_rng(seed)
    vector = layout.initial(rank, seed)
    return (vector + rng.normal(scale=0.05, size=len(vector))).astype(np.float32)


def scaled(batch: Any, scale: float) -> Any:
    """The same batch with another weight, so another norm of the gradient."""
    return {**batch, "w_kl": batch["w_kl"] * np.float32(scale), "w_nll": batch["w_nll"] * np.float32(scale)}


def batches(count: int, *scales: float) -> list[dict[str, Any]]:
    return [scaled(random_batch(VOCABULARY, seed=i % 3), scales[i % len(scales)]) for i in range(count)]


def take(trainer: Trainer, work: list[dict[str, Any]]) -> list[float]:
    return [trainer.step(batch, RATE) for batch in work]


def worker(trainer: OrtTrainingTrainer) -> subprocess.Popen[bytes]:
    return trainer._worker.process


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference against the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def torch_steps(
    model: Any, layout: Layout, lora: np.ndarray, batches: list[Any], rate: float, clip: float
) -> list[np.ndarray]:
    """The LoRA vector after each step of torch's AdamW behind clip_grad_norm_, on gradients of `torch_gradient`."""
    import torch

    vector = torch.nn.Parameter(torch.tensor(lora, dtype=torch.float64))
    optimizer = torch.optim.AdamW([vector], lr=rate)
    found = []
    for batch in batches:
        now = vector.detach().numpy().astype(np.float32)
        vector.grad = torch.tensor(torch_gradient(model, layout, now, batch)[1])
        torch.nn.utils.clip_grad_norm_([vector], clip)
        optimizer.step()
        found.append(vector.detach().numpy().copy())
    return found


def torch_gradient(model: Any, layout: Layout, lora: np.ndarray, batch: Any) -> tuple[float, np.ndarray]:
    """(loss, gradient by the LoRA vector) in float64, from a loss that is written here a second time."""
    import torch

    vector = torch.tensor(lora, dtype=torch.float64, requires_grad=True)
    parts, at = {}, 0
    for name, view in layout.parameters(lora).items():
        parts[name] = vector[at : at + view.size].reshape(view.shape)
        at += view.size
    model = model.double().requires_grad_(False)

    def hook(name: str) -> Any:
        return lambda _module, args, out: out + (args[0] @ parts[f"{name}.lora_A"]) @ parts[f"{name}.lora_B"]

    handles = []
    for i, layer in enumerate(model.model.layers):
        rooms = [(layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))]
        for room, names in rooms:
            for part in names:
                module = getattr(room, f"{part}_proj")
                handles.append(module.register_forward_hook(hook(f"layers.{i}.{part}")))
    t = {name: torch.tensor(np.asarray(value)) for name, value in batch.items()}
    logits = model(t["input_ids"]).logits.flatten(0, 1)[t["positions"]]
    for handle in handles:
        handle.remove()
    q = torch.softmax(logits + t["direct"] * t["unmapped"], -1)
    known = q.gather(1, t["ids"]) * t["on"]
    rest = 1 - known.sum(1, keepdim=True)
    kl = torch.where(known > 0, known * (torch.log(known.clamp(min=1e-300)) - t["logp"]), 0.0).sum(1, keepdim=True)
    kl = kl + rest * (torch.log(rest) - t["rest_logp"])
    loss = (t["w_kl"] * kl - t["w_nll"] * torch.log(q.gather(1, t["labels"]))).sum()
    loss.backward()
    model.float()
    assert vector.grad is not None
    return float(loss.detach()), vector.grad.numpy()
