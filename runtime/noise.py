"""Counter-based noise: the same seed, position and token give the same number, on any device.

The coupled draw (DESIGN.md section 4) needs Gumbel noise g(seed, position, id) that target and
drafter evaluate separately and alike. It is a 32-bit integer hash, so that numpy, a browser and a
phone compute it with ordinary multiplications:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16   (mod 2^32)
    key(i) = mix(mix(mix(mix(seed_low + i) + seed_high) + position_low) + position_high)
    h1 = mix(mix(id + 0x9e3779b9) ^ key(1)),  h2 = mix(h1 + key(2))
    u  = (h1 * 2^20 + (h2 >> 12) + 1/2) / 2^52      in (0, 1), exact in float64
    g  = -log(-log(u))
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_ID = np.uint32(0x9E3779B9)
_A, _B = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_MASK = 0xFFFFFFFF


def mix(x: np.ndarray) -> np.ndarray:
    """The integer hash above, on uint32 of any shape; the argument is overwritten."""
    x ^= x >> np.uint32(16)
    x *= _A
    x ^= x >> np.uint32(15)
    x *= _B
    x ^= x >> np.uint32(16)
    return x


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


@lru_cache(maxsize=256)
def keys(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    """The two 32-bit keys of a position; seed and position are unsigned 64-bit integers."""

    def key(i: int) -> np.uint32:
        x = _mix_int((seed & _MASK) + i)
        x = _mix_int(x + (seed >> 32))
        x = _mix_int(x + (position & _MASK))
        return np.uint32(_mix_int(x + (position >> 32)))

    return key(1), key(2)


@lru_cache(maxsize=8)
def _folded(size: int) -> np.ndarray:
    """mix(id + …) with the first step of the outer mix done: that step is linear in xor, the key's part can follow."""
    spread = mix(np.arange(size, dtype=np.uint32) + _ID)
    return spread ^ (spread >> np.uint32(16))


def loud(seed: int, position: int, size: int, v: float) -> np.ndarray:
    """The ids below `size` whose u is within v of 1, and a few more: where the noise may be large.

    Every id with 1 - u <= v is among them. The last step of the hash leaves its upper half as it
    is, and that half is all this looks at, so it costs six passes over the vocabulary.
    """
    first = keys(seed, position)[0]
    words = _folded(size) ^ (first ^ (first >> np.uint32(16)))
    words *= _A
    words ^= words >> np.uint32(15)
    words *= _B
    lowest = max(0, int((1 - v) * 2.0**32) - 1) & 0xFFFF0000
    return np.asarray((words >= np.uint32(lowest)).nonzero()[0])


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Noise g for token ids, float64 of the same shape."""
    first, second = keys(seed, position)
    h1 = mix(mix(ids.astype(np.uint32) + _ID) ^ first)
    return gumbel_of(h1, mix(h1 + second))


def gumbel_of(h1: np.ndarray, h2: np.ndarray) -> np.ndarray:
    """Noise g from the two words of the hash, uint32 -> float64."""
    u = (h1 * 2.0**20 + (h2 >> np.uint32(12)) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(u)))


def uniform(seed: int, position: int, purpose: int) -> float:
    """One number in (0, 1) for a position; `purpose` keeps several at one position apart."""
    first, second = keys(seed, position)
    h1 = _mix_int(_mix_int(purpose + 0x9E3779B9) ^ int(first))
    return (h1 * 2.0**20 + (_mix_int(h1 + int(second)) >> 12) + 0.5) * 2.0**-52
