"""What a peer loads: the checkpoint that a bundle's model was made from, found again and checked."""

from __future__ import annotations

from pathlib import Path

from omnidraft.runtime.bundle import ModelInfo
from omnidraft.runtime.errors import OmniDraftError


def folder_of(model: ModelInfo) -> Path:
    """The Hugging Face folder. Raises OmniDraftError if it is not here any more, or is another one now."""
    from omnidraft.export.sources import locate, resolve

    name = model.source["name"]
    source = resolve(locate(name))
    _check(name, source.weights_sha256, model)
    return source.folder


def gguf_of(model: ModelInfo) -> Path:
    """The .gguf file. Raises OmniDraftError if the model was made from none, or it is not here any more."""
    from omnidraft.export.sources import locate

    name = model.source["name"]
    located = locate(name)
    if located.kind != "gguf":
        raise OmniDraftError(f"its checkpoint {name} is no .gguf file, and llama.cpp reads no other")
    _check(name, located.digest, model)
    return located.path


def _check(name: str, digest: str, model: ModelInfo) -> None:
    if digest != model.weights_sha256:
        raise OmniDraftError(f"{name} is not the checkpoint that the bundle was made from; export the bundle again")
