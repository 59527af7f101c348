"""LoRA parameters survive the file, and a damaged file is one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.errors import OmniDraftError


def test_round_trip(tmp_path: Path) -> None:
    parameters = {"layers.0.q.lora_A": np.ones((8, 2), np.float32), "layers.0.q.lora_B": np.zeros((2, 8), np.float32)}
    save_adapter(tmp_path / "a.onnx_adapter", parameters)
    loaded = load_adapter(tmp_path / "a.onnx_adapter")
    assert loaded.keys() == parameters.keys()
    assert all(np.array_equal(loaded[name], parameters[name]) for name in parameters)


def test_damaged_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx_adapter"
    with pytest.raises(OmniDraftError, match="no such adapter"):
        load_adapter(path)
    path.write_bytes(b"not an adapter")
    with pytest.raises(OmniDraftError, match="damaged"):
        load_adapter(path)
