"""Memory and disk space that an export needs, found out before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omnidraft.export import cache
from omnidraft.export.sources import Located, count_parameters
from omnidraft.runtime.errors import OmniDraftError

# Measured on the export of a 135 M model: 2.4 GB at the peak, with static graphs 3.6, 0.6 GB of it the libraries.
MEMORY_BASE, MEMORY_PER_WEIGHT, MEMORY_PER_STATIC_WEIGHT = 600 << 20, 14, 23
MEMORY_PER_COMPILED_WEIGHT = 40  # QNN's process takes 5.2 GB beside ours
# Of a graph, embeddings included.
BYTES_PER_WEIGHT = {"fp32": 4.1, "fp16": 2.1, "int8": 2.1, "int4": 1.2, "a16w8": 1.3, "a8w8": 1.3}
GB = 1e9


def require(models: Sequence[Located], precisions: Sequence[str], static: bool, out: Path) -> None:
    """Raise OmniDraftError if memory or disk space is too little for exporting models one after the other.

    `static`: whether graphs of fixed shapes are among them.
    """
    import psutil

    weights = [count_parameters(model) for model in models]
    need, have = memory(max(weights), static, "fp16" in precisions), psutil.virtual_memory().available
    if need > have:
        raise OmniDraftError(
            f"exporting {max(weights) / 1e6:.0f} M weights needs about {need / GB:.1f} GB of memory, "
            f"{have / GB:.1f} GB are free; close other programs or export on a larger machine"
        )
    graphs = sum(weights) * sum(BYTES_PER_WEIGHT[p] for p in precisions)
    converted = 4 * sum(count for model, count in zip(models, weights, strict=True) if model.kind == "gguf")
    for folder, size, option in (
        (out.parent, graphs, f"--out {out}"),
        (cache.cache_root(), graphs + converted, "the cache"),
    ):
        free = shutil.disk_usage(_existing(folder)).free
        if size > free:
            raise OmniDraftError(f"{option}: needs about {size / GB:.1f} GB on its disk, {free / GB:.1f} GB are free")


def memory(weights: int, static: bool, compiled: bool) -> int:
    """Bytes of memory that the export of a model with that many weights takes at its peak."""
    fixed = MEMORY_PER_COMPILED_WEIGHT if compiled else MEMORY_PER_STATIC_WEIGHT
    return MEMORY_BASE + (fixed if static else MEMORY_PER_WEIGHT) * weights


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
