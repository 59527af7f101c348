"""Calibration curves of the acceptance head: what it predicted against what was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omnidraft.adapters.head import Calibration


def draw(path: Path, curves: Mapping[str, Calibration]) -> None:
    """Write a .png or .svg. Raises OSError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, curve in curves.items():
        predicted, observed = [point.predicted for point in curve.bins], [point.observed for point in curve.bins]
        label = f"{name}: ECE {curve.error:.3f}, bias {curve.bias:+.3f}"
        axes.plot(predicted, observed, marker="o", markersize=4, label=label)
    axes.set(xlabel="predicted acceptance", ylabel="observed acceptance", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
