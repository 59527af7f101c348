"""One matrix for tied embeddings in int8 graphs, where the builder writes the embedding once more in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

BITS = 8


def share_embedding(path: Path, data: str) -> bool:
    """Let the embedding of a graph read the rows of its int8 output layer; the fp32 matrix goes.

    `data`: name of the file beside `path` with the graph's tensors, which is written anew. For checkpoints that tie
    the two. Returns whether the graph could be changed: its output layer is an 8-bit MatMulNBits of whole blocks.
    """
    model = onnx.load(path)
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    head = next((node for node in graph.node if node.op_type == "MatMulNBits" and "logits" in node.output), None)
    lookup = next((node for node in graph.node if node.op_type == "Gather" and node.input[1] == "input_ids"), None)
    if head is None or lookup is None:
        return False
    sizes = {attribute.name: helper.get_attribute_value(attribute) for attribute in head.attribute}
    rows, columns, block = sizes["N"], sizes["K"], sizes["block_size"]
    if sizes["bits"] != BITS or columns % block or list(tensors[lookup.input[0]].dims) != [rows, columns]:
        return False
    shape = numpy_helper.from_array(np.array([rows, columns], np.int64), "embedding_shape")
    flat = helper.make_node("Reshape", [head.input[1], shape.name], ["embedding_codes"], "embedding_codes")
    shared = helper.make_node(
        "GatherBlockQuantized",
        [flat.output[0], "input_ids", *head.input[2:4]],
        list(lookup.output),
        "embedding",
        domain="com.microsoft",
        bits=BITS,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    old = lookup.input[0]
    at = list(graph.node).index(lookup)
    graph.node.remove(lookup)
    graph.node.insert(at, shared)
    graph.node.insert(at, flat)
    graph.initializer.append(shape)
    if not any(old in node.input for node in graph.node):
        graph.initializer.remove(tensors[old])
    (path.parent / data).unlink(missing_ok=True)
    onnx.save_model(model, path, save_as_external_data=True, location=data)
    return True
