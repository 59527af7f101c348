"""Block-wise weight quantization in the layout of ONNX Runtime's MatMulNBits operator.

A weight W [out, in] is cut along its input axis into blocks of BLOCK values; each block has one
scale, and in 4 bits one zero point as well: W ~ (code - zero_point) * scale. Layout and rounding
follow the operator's contract (onnxruntime/docs/ContribOperators.md, com.microsoft.MatMulNBits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized matrix.

    codes: uint8 [out, blocks, BLOCK * bits / 8], the low nibble first in 4 bits; scales: float32 [out, blocks];
    zero_points: uint8 [out, ceil(blocks / 2)], two nibbles a byte, low first (4 bits), or None for 2^(bits-1) (8 bits).
    """

    bits: int
    columns: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None


def quantize(weight: NDArray[np.float32], bits: int) -> QuantizedWeight:
    """Quantize [out, in] to 8 bits (symmetric) or 4 bits (asymmetric: a zero point a block).

    The error of a value is at most half a scale of its block. Raises ValueError for another number of bits.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    blocks = _blocks(weight)
    if bits == 8:
        scales = np.abs(blocks).max(axis=2) / np.float32(127)
        codes = np.rint(blocks / _divisor(scales)) + 128
        return QuantizedWeight(8, weight.shape[1], codes.astype(np.uint8), scales, None)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scales = (high - low) / np.float32(15)
    zeros = np.clip(np.rint(-low / _divisor(scales)[..., 0]), 0, 15)
    codes = np.clip(np.rint(blocks / _divisor(scales)) + zeros[..., None], 0, 15).astype(np.uint8)
    return QuantizedWeight(4, weight.shape[1], _nibbles(codes), scales, _nibbles(zeros.astype(np.uint8)))


def dequantize(quantized: QuantizedWeight) -> NDArray[np.float32]:
    """The matrix [out, in] that MatMulNBits multiplies with, up to its own rounding of activations."""
    rows, blocks = quantized.scales.shape
    codes: NDArray[np.uint8] = quantized.codes
    zeros: NDArray[np.float32] = np.full((rows, blocks), 2 ** (quantized.bits - 1), np.float32)
    if quantized.bits == 4:
        codes = _unpack(codes)
        if quantized.zero_points is not None:
            zeros = _unpack(quantized.zero_points)[:, :blocks].astype(np.float32)
    values = (codes.astype(np.float32) - zeros[..., None]) * quantized.scales[..., None]
    return values.reshape(rows, -1)[:, : quantized.columns]


def _blocks(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """[out, in] -> [out, blocks, BLOCK], the last block padded with zeros."""
    rows, columns = weight.shape
    padded = np.pad(weight.astype(np.float32, copy=False), ((0, 0), (0, -columns % BLOCK)))
    return padded.reshape(rows, -1, BLOCK)


def _divisor(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales [out, blocks, 1] to divide by: 1 for a block of zeros."""
    return np.where(scales == 0, np.float32(1), scales)[..., None]


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack pairs along the last axis into bytes, the low nibble first."""
    if codes.shape[-1] % 2:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
    high: NDArray[np.uint8] = codes[..., 1::2] << np.uint8(4)
    return codes[..., ::2] | high


def _unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `_nibbles`, an even number of codes along the last axis."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
