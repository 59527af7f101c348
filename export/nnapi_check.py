"""What ONNX Runtime's checker of mobile usability says of a graph on Android's NNAPI.

It compares operators and shapes with a list. Nothing is run: that NNAPI's drivers take a node, it cannot know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnxruntime.tools.mobile_helpers.usability_checker import check_nnapi_partitions


def check_nnapi(model: Path) -> dict[str, Any]:
    """For the manifest: `nodes`, `partitions`, `share` of the nodes that are supported, `unsupported` operators, and
    the checker's verdict: "yes", "maybe" or "no"."""
    # Shapes do not depend on the weights, which are large and stay where they are.
    graph = onnx.shape_inference.infer_shapes(onnx.load(model, load_external_data=False))
    found = check_nnapi_partitions(graph, require_fixed_input_sizes=True)
    return {
        "nodes": found.num_nodes,
        "partitions": found.num_partitions,
        "share": round(found.num_supported_nodes / found.num_nodes, 4),
        "unsupported": sorted(found.unsupported_ops),
        "verdict": found.suitability().name.lower(),
    }
