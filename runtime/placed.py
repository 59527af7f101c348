"""Where a graph really runs, counted from the nodes that ONNX Runtime says each execution provider was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

CPU = "CPUExecutionProvider"
RECORD = "session.record_ep_graph_assignment_info"  # the entry, set to "1", of sessions whose nodes can be counted
KINDS, NAMES = 3, 3  # of nodes, in a line


@dataclass(frozen=True)
class Placed:
    """Where a graph runs. `actual` and the keys of `share` are ONNX Runtime's names, the largest share first.

    `share`: nodes given to each provider / nodes; `why`: why it is not as requested, "" if it is; `instead`: the graph
    that took over from one compiled for the device, "" if none did.
    """

    requested: str
    actual: str
    share: dict[str, float]
    why: str = ""
    instead: str = ""


def count(session: ort.InferenceSession, requested: str, provider: str, why: str = "") -> Placed:
    """Who was given a session's nodes; with no other reason, those that `provider` was not given are one."""
    nodes = assignment(session)
    counts = {name: len(theirs) for name, theirs in nodes.items()}
    counts = counts or {CPU: 1}  # nothing is recorded of a graph in ORT format, which nobody else is given
    total = sum(counts.values())
    others = {name: theirs for name, theirs in nodes.items() if name != provider}
    elsewhere = [node for theirs in others.values() for node in theirs]
    if elsewhere and not why:
        why = f"{len(elsewhere)} of {total} nodes ({describe(elsewhere)}) are on {' and '.join(others)}"
    return Placed(requested, next(iter(counts)), {name: given / total for name, given in counts.items()}, why)


def assignment(session: ort.InferenceSession) -> dict[str, list[Any]]:
    """ONNX Runtime's nodes (`op_type`, `name`) by provider, the largest share first; {} where none were recorded."""
    found: dict[str, list[Any]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, []).extend(part.get_nodes())
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def describe(nodes: Sequence[Any]) -> str:
    """Nodes in a few words: `2 Trilu, 1 Range: mask, mask_1, range and 4 more`. Some graphs give theirs no names."""
    kinds = [f"{number} {op}" for op, number in Counter(node.op_type for node in nodes).most_common()]
    names = [node.name for node in nodes if node.name]
    return _first(kinds, KINDS) + (f": {_first(names, NAMES)}" if names else "")


def warnings(placed: Mapping[str, Placed]) -> list[str]:
    """One line for each reason why models do not run as requested, by their names, with the graphs that took over."""
    reasons: dict[tuple[str, str], dict[str, str]] = {}
    for model, where in placed.items():
        if where.why:
            reasons.setdefault((where.requested, where.why), {})[model] = where.instead
    return [f"{' and '.join(models)}: asked for {ep}, {why}{_instead(models)}" for (ep, why), models in reasons.items()]


def _instead(graphs: Mapping[str, str]) -> str:
    named = ", ".join(f"{model} {graph}" for model, graph in graphs.items() if graph)
    return f"; running instead: {named}" if named else ""


def _first(texts: Sequence[str], most: int) -> str:
    left = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left} more" if left > 0 else "")
