"""An int8 graph of tied embeddings keeps one matrix: its embedding reads the output layer's rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoints import SIZES, write_checkpoint
from onnx import numpy_helper

from omnidraft.export import cache
from omnidraft.export.shared_embedding import share_embedding
from omnidraft.export.sources import locate, resolve
from omnidraft.export.target import DATA, MODEL, build_target
from omnidraft.runtime.decoder import Decoder

ROWS, HIDDEN = SIZES["vocab_size"], SIZES["hidden_size"]
IDS = np.random.default_rng(0).integers(0, ROWS, 40)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path / "cache")


def build(folder: Path, **overrides: object) -> Path:
    return build_target(resolve(locate(str(write_checkpoint(folder, **overrides)))), "int8")


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def logits(path: Path) -> np.ndarray:
    decoder = Decoder(path)
    decoder.reserve(64)
    return decoder.run(IDS).copy()


def with_its_own_embedding(path: Path, folder: Path) -> Path:
    """The same graph with an ordinary embedding of fp32 rows, those that the output layer's codes stand for."""
    folder.mkdir()
    model = onnx.load(path)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    lookup = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    head = next(node for node in model.graph.node if "logits" in node.output)
    codes, scales = tensors[head.input[1]].reshape(ROWS, -1), tensors[head.input[2]].reshape(ROWS, -1)
    rows = (codes.astype(np.float32) - 128) * np.repeat(scales, HIDDEN // scales.shape[1], axis=1)
    model.graph.initializer.append(numpy_helper.from_array(rows, "rows"))
    lookup.CopyFrom(onnx.helper.make_node("Gather", ["rows", "input_ids"], list(lookup.output)))
    onnx.save_model(model, folder / MODEL, save_as_external_data=True, location=DATA)
    return folder / MODEL


def test_the_embedding_is_the_output_layer_bit_for_bit(tmp_path: Path) -> None:
    made = build(tmp_path / "tied") / MODEL
    assert "GatherBlockQuantized" in operators(made)
    matrices = [t for t in onnx.load(made).graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert not any(list(t.dims) == [ROWS, HIDDEN] for t in matrices), "the fp32 matrix is still there"
    assert np.array_equal(logits(made), logits(with_its_own_embedding(made, tmp_path / "own")))


def test_what_is_not_tied_keeps_its_embedding(tmp_path: Path) -> None:
    made = build(tmp_path / "untied", tie_word_embeddings=False) / MODEL
    assert "GatherBlockQuantized" not in operators(made)


def test_rows_of_no_whole_blocks_are_left_as_they_are(tmp_path: Path) -> None:
    made = build(tmp_path / "odd", hidden_size=96) / MODEL
    assert "GatherBlockQuantized" not in operators(made)
    copied = shutil.copytree(made.parent, tmp_path / "copy") / MODEL
    assert not share_embedding(copied, DATA)
    assert copied.read_bytes() == made.read_bytes()
