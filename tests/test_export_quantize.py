"""Block-wise quantization: error bound, layout, and agreement with the operator that reads it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from omnidraft.export.quantize import BLOCK, QuantizedWeight, dequantize, quantize


def random_weight(rows: int, columns: int, seed: int, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, columns)) * rng.uniform(0.1, 3, size=(rows, 1)) + shift).astype(np.float32)


def run_operator(x: np.ndarray, packed: QuantizedWeight, rows: int, accuracy_level: int) -> np.ndarray:
    tensors = {"codes": packed.codes, "scales": packed.scales}
    if packed.zero_points is not None:
        tensors["zeros"] = packed.zero_points
    node = helper.make_node(
        "MatMulNBits",
        ["x", *tensors],
        ["y"],
        domain="com.microsoft",
        K=x.shape[1],
        N=rows,
        bits=packed.bits,
        block_size=BLOCK,
        accuracy_level=accuracy_level,
    )
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [x.shape[0], rows])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 100),
    st.integers(0, 2**31),
    st.sampled_from([-9.0, 0.0, 4.0]),
    st.sampled_from([4, 8]),
)
def test_error_is_at_most_half_a_scale(rows: int, columns: int, seed: int, shift: float, bits: int) -> None:
    weight = random_weight(rows, columns, seed, shift)
    packed = quantize(weight, bits)
    scales = np.repeat(packed.scales, BLOCK, axis=1)[:, :columns]
    assert dequantize(packed).shape == weight.shape
    assert np.all(np.abs(dequantize(packed) - weight) <= scales * 0.5 + np.abs(weight) * 1e-5 + 1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_blocks_stay_zero(bits: int) -> None:
    weight = np.zeros((3, 70), np.float32)
    weight[1, 40] = 1.0
    restored = dequantize(quantize(weight, bits))
    assert np.isfinite(restored).all()
    assert np.array_equal(restored[0], weight[0])
    assert np.array_equal(restored[1, :BLOCK], weight[1, :BLOCK])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 96, 100])
def test_the_operator_multiplies_with_the_dequantized_matrix(bits: int, columns: int) -> None:
    weight = random_weight(48, columns, seed=1)
    packed = quantize(weight, bits)
    x = np.random.default_rng(2).normal(size=(3, columns)).astype(np.float32)
    expected = x @ dequantize(packed).T
    assert np.allclose(run_operator(x, packed, 48, accuracy_level=0), expected, atol=2e-4 * np.abs(expected).max())
    # Level 4 rounds the activations to 8 bits as well.
    assert np.allclose(run_operator(x, packed, 48, accuracy_level=4), expected, atol=0.03 * np.abs(expected).max())
    # Control: the nibbles in the other order are another matrix.
    if bits == 4:
        swapped = QuantizedWeight(
            4, columns, (packed.codes << 4) | (packed.codes >> 4), packed.scales, packed.zero_points
        )
        assert not np.allclose(run_operator(x, swapped, 48, 0), expected, atol=0.03 * np.abs(expected).max())


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="4 or 8"):
        quantize(np.ones((2, 2), np.float32), 2)
