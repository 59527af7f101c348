"""How the acceptance head learns (what it is: `runtime/acceptance.py`), and how well it says what happens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnidraft.runtime.acceptance import check

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, as in the drafter's own training
# skip and b2 learn faster by this factor: they have far to go, and else the hidden layer learns noise in their place.
DIRECT = 30
CONSTANT, TINY = 1e-4, 1e-12  # an input that varies less, as a share of its mean or in all, counts as constant
# numpy's BLAS gives larger products (rows · inner · columns) to several threads, and they wait for each other: on a
# machine that does anything else, a step of training would take 3 to 50 times as long.
ONE_THREAD = 1 << 18

Array = NDArray[Any]
Parameters = dict[str, Array]


def logits(parameters: Mapping[str, Array], hidden: Array, features: Array) -> Array:
    """z [n] of n proposals: hidden [n, H], features [n, F]. What the graph computes."""
    return _forward(parameters, _inputs(parameters, hidden, features))[0]


def gradient(
    parameters: Mapping[str, Array], hidden: Array, features: Array, labels: Array
) -> tuple[float, Parameters]:
    """The mean cross entropy with labels [n] from 0 to 1, and its gradient by parameter."""
    return _gradient(parameters, _inputs(parameters, hidden, features), labels)


def train(
    parameters: Mapping[str, Array],
    hidden: Array,
    features: Array,
    labels: Array,
    epochs: int,
    rate: float = 1e-3,
    batch: int = 64,
    seed: int = 0,
    decay: float = 0.01,
) -> Parameters:
    """The head after learning labels [n] from 0 to 1, by AdamW on inputs of deviation 1. Holds nothing out.

    `rate` is that of the first step; it falls to zero, linearly, so that the last batches do not decide. `decay` is for
    the hidden layer: a skip of zero would be no neutral place. Raises OmniDraftError if the parameters are not those
    of a head, ValueError if the rest does not fit.
    """
    check(parameters)
    raw, y = _inputs(parameters, hidden, features), np.asarray(labels, np.float32)
    if y.shape != (len(raw),) or not len(y):
        raise ValueError(f"{list(y.shape)} labels for {len(raw)} proposals; there must be one for each")
    if not (y.min() >= 0 and y.max() <= 1):
        raise ValueError("labels must be from 0 to 1")
    if not np.isfinite(raw).all():
        raise ValueError("hidden or features have numbers that are not finite")
    standard = Standard.of(raw)
    learned, x = _start(parameters, standard), standard.inputs(raw)
    first, second = ({name: np.zeros_like(value) for name, value in learned.items()} for _ in range(2))
    steps, rng = epochs * -(-len(x) // batch), np.random.default_rng(seed)
    for step in range(steps):
        if step % (steps // epochs) == 0:
            shuffled = iter(np.array_split(rng.permutation(len(x)), steps // epochs))
        rows = next(shuffled)
        rate_now, corrections = rate * (1 - step / steps), [1 - beta ** (step + 1) for beta in BETAS]
        for name, slope in _gradient(learned, x[rows], y[rows])[1].items():
            first[name] += (1 - BETAS[0]) * (slope - first[name])
            second[name] += (1 - BETAS[1]) * (slope * slope - second[name])
            root = np.sqrt(second[name] / corrections[1]) + EPSILON
            pace, fade = (DIRECT, 0.0) if name in ("acceptance.skip", "acceptance.b2") else (1, decay)
            learned[name] -= pace * rate_now * (first[name] / corrections[0] / root + fade * learned[name])
    return standard.outward(learned)


class Point(NamedTuple):
    """One bin of a calibration curve: the means of what was predicted and of what happened, and of how many."""

    predicted: float
    observed: float
    samples: int


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error; bias, mean(predicted) - mean(observed); the points of the curve."""

    error: float
    bias: float
    bins: tuple[Point, ...]


def calibration(predicted: Array, observed: Array, bins: int = 10) -> Calibration:
    """Of predictions [n] against what happened [n], 0 to 1, in bins of equal counts; equal predictions share a bin.

    Raises ValueError without any, or if they do not fit.
    """
    if predicted.shape != observed.shape or predicted.ndim != 1 or not len(predicted):
        raise ValueError(f"{list(predicted.shape)} predictions and {list(observed.shape)} observations do not fit")
    order = np.argsort(predicted, kind="stable")
    p, seen = predicted[order].astype(np.float64), observed[order].astype(np.float64)
    starts = np.unique(np.searchsorted(p, p[np.arange(bins) * len(p) // bins]))
    counts = np.diff(starts, append=len(p))
    means = np.add.reduceat(p, starts) / counts, np.add.reduceat(seen, starts) / counts
    points = tuple(Point(float(a), float(b), int(n)) for a, b, n in zip(*means, counts, strict=True))
    error = float((np.abs(means[0] - means[1]) * counts).sum() / len(p))
    return Calibration(error, float(p.mean() - seen.mean()), points)


@dataclass(frozen=True)
class Standard:
    """Inputs [n, H + F] brought to mean 0 and deviation 1, and parameters to match: the logits stay.

    `mean` and `deviation` [H + F] are float64; the deviation of an input that is `constant` [H + F] counts as 1.
    """

    mean: Array
    deviation: Array
    constant: Array

    @classmethod
    def of(cls, x: Array) -> Standard:
        """Of these inputs."""
        mean, deviation = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
        constant = deviation <= CONSTANT * np.abs(mean) + TINY
        return cls(mean, np.where(constant, 1.0, deviation), constant)

    def inputs(self, x: Array) -> Array:
        """Raw inputs in standard coordinates, float32."""
        return ((x - self.mean) / self.deviation).astype(np.float32)

    def inward(self, raw: Mapping[str, Array]) -> Parameters:
        """Parameters for raw inputs as those for standard ones, float32."""
        return _moved(raw, self.deviation, self.mean)

    def outward(self, standard: Mapping[str, Array]) -> Parameters:
        """What `inward` takes, from what it gives."""
        return _moved(standard, 1 / self.deviation, -self.mean / self.deviation)


def _moved(parameters: Mapping[str, Array], scale: Array, shift: Array) -> Parameters:
    """Parameters that give for x what the given ones give for x · scale + shift."""
    skip = parameters["acceptance.skip"]
    moved = dict(parameters)
    for weight, bias, rows in (("w1", "b1", slice(None)), ("skip", "b2", slice(-len(skip), None))):
        old = parameters[f"acceptance.{weight}"].astype(np.float64)
        moved[f"acceptance.{weight}"] = scale[rows, None] * old
        moved[f"acceptance.{bias}"] = parameters[f"acceptance.{bias}"] + shift[rows] @ old
    return {name: value.astype(np.float32) for name, value in moved.items()}


def _start(parameters: Mapping[str, Array], standard: Standard) -> Parameters:
    """Where learning begins, in standard coordinates, with the same logits as `parameters`.

    While w2 is zero the hidden layer says nothing, so its random weights are taken as they are: they are of the right
    size for inputs of deviation 1. Rows of constant inputs are zero: one that moves later must not add noise.
    """
    start = standard.inward(parameters)
    if not parameters["acceptance.w2"].any():
        w1 = np.where(standard.constant[:, None], 0, parameters["acceptance.w1"]).astype(np.float32)
        start.update({"acceptance.w1": w1, "acceptance.b1": parameters["acceptance.b1"].astype(np.float32)})
    return start


def _inputs(parameters: Mapping[str, Array], hidden: Array, features: Array) -> Array:
    """x [n, H + F]. Raises ValueError if the parameters are for others."""
    width, count = len(parameters["acceptance.w1"]), len(parameters["acceptance.skip"])
    wanted = [[len(hidden), width - count], [len(hidden), count]]
    if [list(hidden.shape), list(features.shape)] != wanted:
        raise ValueError(
            f"hidden {list(hidden.shape)} and features {list(features.shape)}, not {wanted[0]}, {wanted[1]}"
        )
    return np.concatenate([hidden, features], 1)


def _forward(parameters: Mapping[str, Array], x: Array) -> tuple[Array, Array, Array]:
    """z [n], and what the backward pass wants of the hidden layer: before silu, and its sigmoid, both [n, WIDTH]."""
    skip = parameters["acceptance.skip"]
    layer = _product(x, parameters["acceptance.w1"]) + parameters["acceptance.b1"]
    gate = _sigmoid(layer)
    direct = x[:, -len(skip) :] @ skip + parameters["acceptance.b2"]
    return ((layer * gate) @ parameters["acceptance.w2"] + direct)[:, 0], layer, gate


def _gradient(parameters: Mapping[str, Array], x: Array, labels: Array) -> tuple[float, Parameters]:
    z, layer, gate = _forward(parameters, x)
    loss = float((np.logaddexp(0, z) - labels * z).mean())
    dz = ((_sigmoid(z) - labels) / len(z))[:, None].astype(z.dtype)
    d_layer = (dz @ parameters["acceptance.w2"].T) * gate * (1 + layer * (1 - gate))
    return loss, {
        "acceptance.w1": _product(x.T, d_layer),
        "acceptance.b1": d_layer.sum(0, keepdims=True),
        "acceptance.w2": (layer * gate).T @ dz,
        "acceptance.skip": x[:, -len(parameters["acceptance.skip"]) :].T @ dz,
        "acceptance.b2": dz.sum(0, keepdims=True),
    }


def _product(a: Array, b: Array) -> Array:
    """a @ b, on one thread."""
    rows = max(1, ONE_THREAD // b.size)
    return np.concatenate([a[i : i + rows] @ b for i in range(0, len(a), rows)])


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))  # no overflow on either side
