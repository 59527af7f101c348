"""The learning curve as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: acceptance rate at k = 1 (lines) and k = 4 (dashes) of each task, and the loss, over tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    rates = figure.subplots()
    tokens = [record["tokens"] / 1e6 for record in history]
    for number, task in enumerate(history[-1]["acceptance"]):
        for k, style in (("k1", "-"), ("k4", "--")):
            values = [record["acceptance"].get(task, {}).get(k, math.nan) for record in history]
            rates.plot(tokens, values, style, color=f"C{number}", marker=".", label=f"{task}, {k[0]} = {k[1]}")
    rates.set_xlabel("training tokens, millions")
    rates.set_ylabel("predicted acceptance rate, held-out prompts")
    rates.set_ylim(0, 1)
    rates.grid(alpha=0.3)
    loss = rates.twinx()
    loss.plot(tokens, [record["loss"] for record in history], color="0.6", label="training loss")
    loss.set_ylabel("training loss")
    handles, labels = rates.get_legend_handles_labels()
    more, names = loss.get_legend_handles_labels()
    rates.legend(handles + more, labels + names, fontsize="small", loc="lower right")
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
