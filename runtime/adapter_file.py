"""LoRA parameters as ONNX Runtime's `.onnx_adapter` file."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.untrusted import MIB

FORMAT_VERSION = 1
MAX_BYTES = 64 * MIB


def save_adapter(path: Path, parameters: Mapping[str, np.ndarray]) -> None:
    """Write LoRA parameters: names of the drafter graph's hooks -> float32 lora_A [in, r] or lora_B [r, out].

    Raises OSError if the file cannot be written in full.
    """
    file = ort.AdapterFormat()
    file.set_adapter_version(FORMAT_VERSION)
    file.set_model_version(1)
    file.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in parameters.items()})
    try:
        file.export_adapter(str(path))
    except RuntimeError:  # ONNX Runtime does not say why
        raise OSError(errno.EIO, "ONNX Runtime could not write it", str(path)) from None


def load_adapter(path: Path) -> dict[str, np.ndarray]:
    """The parameters of a file. Raises OmniDraftError if it cannot be read, or is of another version."""
    if not path.is_file():
        raise OmniDraftError(f"{path}: no such adapter")
    if path.stat().st_size > MAX_BYTES:
        raise OmniDraftError(f"{path}: too large for an adapter, at most {MAX_BYTES // MIB} MiB are read")
    try:
        file = ort.AdapterFormat.read_adapter(str(path))
    except Exception:  # ONNX Runtime raises many types, with lines of its source in the message
        raise OmniDraftError(f"{path}: not an adapter, or a damaged one; give an .onnx_adapter file") from None
    if file.get_adapter_version() != FORMAT_VERSION:
        raise OmniDraftError(f"{path}: adapter version {file.get_adapter_version()}, this is for {FORMAT_VERSION}")
    return {name: value.numpy().copy() for name, value in file.get_parameters().items()}
