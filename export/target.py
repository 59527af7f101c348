"""Decoder graphs from onnxruntime-genai's model builder, for every architecture it knows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omnidraft.export import cache
from omnidraft.export.libraries import first_line, quiet
from omnidraft.export.shared_embedding import share_embedding
from omnidraft.export.sources import Source
from omnidraft.runtime.errors import OmniDraftError

MODEL, DATA = "model.onnx", "model.onnx.data"
INPUTS, OUTPUTS = {"input_ids", "attention_mask"}, {"logits", "hidden_states"}
NORMALIZED = 2  # counts the changes that are made to the builder's graphs, so that older cached ones are left alone
# int8: blocks of 64 make a pass 13 % quicker than blocks of 32; with blocks of 128 rows depend on how many there are.
# int4: the builder's plain asymmetric algorithm writes a graph that does not load when embeddings are tied; its "rtn"
# does. The output layer and the layers that matter most in 8 bits take no more time and lose a third less (KL).
OPTIONS = {
    "fp32": [],
    "int8": ["block_size=64"],
    "int4": [
        "algo_config=rtn",
        "is_symmetric=false",
        "matmul_mixed_precision=last_matmul:int8,mixed_layers:int8",
    ],
}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"bits": 8, "block_size": 64, "accuracy_level": 4, "symmetric": True},
    "int4": {
        "bits": 4,
        "block_size": 32,
        "accuracy_level": 4,
        "symmetric": False,
        "output_layer_bits": 8,
        "mixed_layers_bits": 8,
    },
}


def build_target(source: Source, precision: str, hidden_states: bool = False) -> Path:
    """The folder (cached) with model.onnx and model.onnx.data of a checkpoint.

    precision: "fp32", "int8" or "int4"; hidden_states: give the last hidden state as an output as well.
    Raises OmniDraftError if the builder does not know the architecture, or its graph needs what the runtime has not.
    """
    options = OPTIONS[precision] + (["include_hidden_states=true"] if hidden_states else [])
    key = cache.key_of(
        weights=source.weights_sha256,
        config=source.config,
        precision=precision,
        options=options,
        builder=version("onnxruntime-genai"),
        quantizer=version("onnxruntime"),
        normalized=NORMALIZED,
    )

    def make(folder: Path) -> None:
        with TemporaryDirectory(prefix="builder-", dir=folder) as scratch:
            made = Path(scratch) / "out"
            _run_builder(source, precision, options, made, Path(scratch) / "work")
            _normalize(made / MODEL, source)
            if precision == "int8" and source.config.get("tie_word_embeddings"):
                share_embedding(made / MODEL, DATA)
            for name in (MODEL, DATA):
                if (made / name).is_file():
                    shutil.move(made / name, folder / name)

    return cache.find_or_make("graphs", key, make)


def _run_builder(source: Source, precision: str, options: list[str], out: Path, work: Path) -> None:
    with quiet():
        parse_extra_options, create_model = _builder()
        arguments = ("", str(source.folder), str(out), precision, "cpu", str(work))
        try:
            create_model(*arguments, **parse_extra_options(*arguments, options))
        except NotImplementedError:
            raise OmniDraftError(
                f"{source.name}: architecture {source.architecture} is not known to onnxruntime-genai's model builder; "
                "use a checkpoint of another architecture"
            ) from None
        except Exception as error:  # the builder has no exceptions of its own
            raise OmniDraftError(
                f"{source.name}: onnxruntime-genai's model builder failed at {precision} ({first_line(error)})"
            ) from error


def _builder() -> tuple[Callable[..., dict[str, Any]], Callable[..., None]]:
    """The builder's two functions. It is a script beside a package, and imports its own parts by bare names."""
    spec = find_spec("onnxruntime_genai")
    if spec is None or spec.origin is None:
        raise OmniDraftError(
            "onnxruntime-genai is not installed; in the clone run: pip install -c constraints.txt -e '.[export]'"
        )
    folder = str(Path(spec.origin).parent / "models")
    if folder not in sys.path:
        sys.path.append(folder)
    from builder import create_model, parse_extra_options

    return parse_extra_options, create_model


def _normalize(path: Path, source: Source) -> None:
    """Refuse inputs that the runtime does not feed, and write the KV head size where the builder leaves a symbol."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    config = source.config
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for values, plain, caches in (
        (model.graph.input, INPUTS, ("past_key_values.",)),
        (model.graph.output, OUTPUTS, ("present.",)),
    ):
        for value in values:
            if value.name.startswith(caches) and value.name.endswith((".key", ".value")):
                value.type.tensor_type.shape.dim[3].dim_value = head_size
            elif value.name not in plain:
                raise OmniDraftError(
                    f"{source.name}: the graph of {source.architecture} needs {value.name!r}, "
                    "which the runtime has not; use a checkpoint with plain attention layers"
                )
    onnx.save(model, path)
