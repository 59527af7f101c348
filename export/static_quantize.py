"""Static graphs with quantized weights and activations (QDQ), for NPUs that compute in integers.

All widths get the same scales: they are calibrated once, on one width, over real text. Scales of each width's own
would make the same token another number in a pass of another width, and drafting would change the text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.calibrate import TensorData, TensorsData, save_tensors_data
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from omnidraft.export.libraries import quiet
from omnidraft.export.onnx_writer import WeightsFile
from omnidraft.export.static_graph import LORA, NORM
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.static_decoder import StaticDecoder

# What is not quantized. Squares span twice the digits that their values do: with 16-bit norms SmolLM2's perplexity
# goes from 19 to 400,000, with float ones to 20. What an adapter will add is not known at calibration.
FLOAT_NODES = (NORM, LORA)
ACTIVATIONS = {"a16w8": quantization.QuantType.QUInt16, "a8w8": quantization.QuantType.QUInt8}
# How far below every score a masked one is put: its weight then rounds to 0.
MARGIN = {"a16w8": 16.0, "a8w8": 8.0}
INLINE = 1024  # bytes up to which a tensor stays in the graph's own file
WARNING, ERROR = 2, 3  # severities of ONNX Runtime's log; the first is its default
Ids = Sequence[int]


def quantize_static(
    folder: Path,
    description: Mapping[str, Any],
    scheme: str,
    samples: Sequence[Ids],
    threads: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Write s{S}.{scheme}.onnx and {scheme}.bin, which they share, from the float graphs of `write_static` in `folder`.

    scheme: "a16w8" or "a8w8", bits of activations and weights (8-bit activations are for small models: those of large
    ones have outliers, measure before you ship); `samples`: token ids of real text, the more like what the model will
    read, the better; `out`: another folder to write to. Weights have one scale each, since QNN and NNAPI take no more
    for a MatMul. What an adapter adds beyond the range that was calibrated without it is cut off. Returns the new
    description.

    Raises OmniDraftError for a scheme that is not known, or no text.
    """
    if scheme not in ACTIVATIONS:
        raise OmniDraftError(f"scheme {scheme!r} is unknown; choose from {', '.join(ACTIVATIONS)}")
    if not any(len(ids) for ids in samples):
        raise OmniDraftError("calibration needs text; give at least one sample of it")
    out = out or folder
    file, written = WeightsFile(out / f"{scheme}.bin"), set[str]()
    names = {width: f"{Path(name).stem}.{scheme}.onnx" for width, name in description["widths"].items()}
    with TemporaryDirectory(prefix="quantize-", dir=out) as scratch, _silence():
        ranges, masked = _calibrate(folder, description, scheme, samples, Path(scratch), threads)
        save_tensors_data(ranges, Path(scratch) / "ranges.json")
        for width, name in description["widths"].items():
            _quantize(folder / name, Path(scratch) / names[width], scheme, Path(scratch) / "ranges.json")
            model = onnx.load(Path(scratch) / names[width])
            _share(model, file, written)
            (out / names[width]).write_bytes(model.SerializeToString())
    return {**description, "widths": names, "weights": file.path.name, "masked": masked}


def _calibrate(
    folder: Path, description: Mapping[str, Any], scheme: str, samples: Sequence[Ids], scratch: Path, threads: int
) -> tuple[TensorsData, float]:
    """The range of every value, from passes of the widest graph; and the mask's value for these ranges."""
    width = max(int(width) for width in description["widths"])
    path = folder / description["widths"][str(width)]
    decoder = StaticDecoder(folder, {**description, "widths": {str(width): path.name}}, threads)
    config = _config(path, scheme)
    calibrator = quantization.create_calibrator(
        path,
        config.op_types_to_quantize,
        augmented_model_path=str(scratch / "augmented.onnx"),
        use_external_data_format=True,
    )
    calibrator.collect_data(_Passes(decoder, samples, width))
    found = {
        name: (float(np.min(data.lowest)), float(np.max(data.highest)))
        for name, data in calibrator.compute_data().items()
    }
    masked = _agree(found, description["layers"], MARGIN[scheme])
    data = {name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in found.items()}
    return TensorsData(quantization.CalibrationMethod.MinMax, data), masked


class _Passes(quantization.CalibrationDataReader):
    """The inputs of passes over texts, each made when it is asked for."""

    def __init__(self, decoder: StaticDecoder, samples: Sequence[Ids], width: int) -> None:
        self._feeds = self._go_through(decoder, samples, width)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next pass, None behind the last."""
        return next(self._feeds, None)

    def _go_through(
        self, decoder: StaticDecoder, samples: Sequence[Ids], width: int
    ) -> Iterator[dict[str, np.ndarray]]:
        for ids in samples:
            decoder.rollback(0)
            whole = ids[: decoder.capacity]
            for begin in range(0, len(whole), width):
                rows = whole[begin : begin + width]
                yield decoder.feeds(rows, width)
                decoder.run(rows)


def _agree(ranges: dict[str, tuple[float, float]], layers: int, margin: float) -> float:
    """Set the ranges that follow from what values mean, not from what was seen. Returns the mask's value.

    A key is the same number whether it is new, past or among the others, so these have one range. A masked score
    is cut off `margin` below the lowest: with the mask's own range there would be no digits left for the scores.
    """
    deepest = 0.0
    for layer in range(layers):
        for part in ("key", "value"):
            same = [f"{state}_{part}_{layer}" for state in ("past", "new", "joined")]
            united = min(ranges[name][0] for name in same), max(ranges[name][1] for name in same)
            ranges.update(dict.fromkeys(same, united))
        low, high = ranges[f"layers.{layer}.scores"]
        ranges[f"layers.{layer}.masked"] = low - margin, high
        ranges[f"layers.{layer}.weights"] = 0.0, 1.0
        deepest = max(deepest, high - low + margin)
    masked = -float(np.ceil(deepest))
    ranges["attention_mask"] = masked, 0.0
    ranges.update(dict.fromkeys(("cos", "sin"), (-1.0, 1.0)))
    return masked


def _config(path: Path, scheme: str) -> Any:
    """Settings that QNN needs; the graph's texts alone are read."""
    graph = onnx.load(path, load_external_data=False).graph
    left_out = [node.name for node in graph.node if any(mark in node.name for mark in FLOAT_NODES)]
    return get_qnn_qdq_config(
        path,
        None,
        activation_type=ACTIVATIONS[scheme],
        weight_type=quantization.QuantType.QInt8,
        nodes_to_exclude=left_out,
    )


def _quantize(path: Path, out: Path, scheme: str, ranges: Path) -> None:
    config = _config(path, scheme)
    quantization.quantize_static(
        path,
        out,
        activation_type=config.activation_type,
        weight_type=config.weight_type,
        op_types_to_quantize=config.op_types_to_quantize,
        nodes_to_exclude=config.nodes_to_exclude,
        use_external_data_format=True,
        extra_options=config.extra_options,
        calibration_cache_path=ranges,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what does not matter here: a preparation is recommended, and LoRA inputs are said to hinder folding."""
    logging.disable(logging.WARNING)
    ort.set_default_logger_severity(ERROR)
    try:
        with quiet():
            yield
    finally:
        logging.disable(logging.NOTSET)
        ort.set_default_logger_severity(WARNING)


def _share(model: onnx.ModelProto, file: WeightsFile, written: set[str]) -> None:
    """Move large tensors to a file where equal ones are kept once, whatever graph they are of."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.nbytes < INLINE:
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            continue
        key = sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()
        if key not in written:
            file.add(key, array)
            written.add(key)
        name = tensor.name
        tensor.CopyFrom(file.proto(key))
        tensor.name = name
