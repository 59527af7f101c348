"""The static profile of one model: graphs of fixed shapes, held against the checkpoint, and described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omnidraft.export import cache, calibration_text, parity
from omnidraft.export.nnapi_check import check_nnapi
from omnidraft.export.sources import Source
from omnidraft.export.static_graph import IR_VERSION, OPSET, check_static, write_static
from omnidraft.export.static_quantize import quantize_static
from omnidraft.runtime.static_decoder import StaticDecoder

FLOAT = "fp32"
PRECISIONS = (FLOAT, "a16w8", "a8w8")
FOR_NNAPI = (FLOAT, "a8w8")  # it has no 16-bit activations, and the checker does not look at types
# On a CPU a pass of 5 rows takes as long as one of 1 (SmolLM2: 45 ms, 17 rows 90, 64 rows 330), and a decode of 5 rows
# has room for 4 proposals where all passes have to be of one width. Each width is a session with weights of its own.
WIDTHS = (1, 5, 17, 64)
CONTEXT = 1024
RANK = 32  # of the adapters that learning makes unless it is told otherwise
QUANTIZATION: dict[str, dict[str, Any]] = {
    FLOAT: {},
    "a16w8": {"activation_bits": 16, "bits": 8, "per_channel": False, "symmetric": True, "float": ["norms"]},
    "a8w8": {"activation_bits": 8, "bits": 8, "per_channel": False, "symmetric": True, "float": ["norms"]},
}
DESCRIPTION = "description.json"
QUANTIZED = 1  # counts the changes of what calibration does, so that older cached graphs are left alone


@dataclass(frozen=True)
class StaticModel:
    """A model to write static graphs of. `what`: its name in errors; `rank`: of LoRA inputs, 0 for none.

    `context`: slots of the past, up to the model's own positions.
    """

    source: Source
    what: str
    drafter: bool
    context: int = CONTEXT
    rank: int = 0
    threads: int = 1

    @property
    def slots(self) -> int:
        """C."""
        return min(self.context, self.source.context)

    @property
    def widths(self) -> list[int]:
        """Those of WIDTHS that fit."""
        return [width for width in WIDTHS if width <= self.slots]

    def check(self) -> None:
        """Raise OmniDraftError for a checkpoint that static graphs cannot express."""
        check_static(self.source, self.widths, self.slots, self.drafter, self.rank)


def write_profile(
    model: StaticModel, folder: Path, relative: str, precisions: Sequence[str], step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Write static-PRECISION/ for each precision, fp32 among them, into a folder. Returns what the manifest says.

    `relative`: the folder in the bundle. Raises OmniDraftError for a graph that does not pass the gate.
    """
    made: dict[str, dict[str, Any]] = {}
    exact = folder / f"static-{FLOAT}"
    for precision in (FLOAT, *(precision for precision in precisions if precision != FLOAT)):
        step(f"{precision} static graphs and parity")
        here = folder / f"static-{precision}"
        if precision == FLOAT:
            described = write_static(
                model.source, here, model.widths, model.slots, drafter=model.drafter, rank=model.rank
            )
        else:
            described = _quantized(model, exact, made[FLOAT]["static"], precision, here)
        made[precision] = _entry(model, here, f"{relative}/static-{precision}", precision, described)
    return [made[precision] for precision in precisions]


def _entry(
    model: StaticModel, folder: Path, relative: str, precision: str, described: Mapping[str, Any]
) -> dict[str, Any]:
    expected = parity.reference(model.source, model.threads)
    figures = parity.measure(StaticDecoder(folder, described, model.threads), expected, model.slots)
    parity.require(figures, precision, f"{model.what}, static,")
    widest = described["widths"][str(max(model.widths))]
    return {
        "profile": "static",
        "precision": precision,
        "model": f"{relative}/{widest}",
        "parity": figures,
        "quantization": QUANTIZATION[precision],
        "opset": OPSET,
        "static": dict(described),
        **({"nnapi": check_nnapi(folder / widest)} if precision in FOR_NNAPI else {}),
    }


def _quantized(
    model: StaticModel, exact: Path, described: Mapping[str, Any], scheme: str, folder: Path
) -> dict[str, Any]:
    """Quantize the float graphs (cached: it takes minutes), calibrated on what the model itself says."""
    key = cache.key_of(
        weights=model.source.weights_sha256,
        config=model.source.config,
        described=dict(described),
        drafter=model.drafter,
        scheme=scheme,
        text=[calibration_text.QUESTIONS, calibration_text.ANSWER, model.source.chat_template],
        quantizer=version("onnxruntime"),
        versions=[QUANTIZED, OPSET, IR_VERSION],
    )

    def make(made: Path) -> None:
        decoder = StaticDecoder(exact, described, model.threads)
        texts = calibration_text.own_text(model.source, decoder, model.slots)
        del decoder  # its weights make room for the calibration's
        found = quantize_static(exact, described, scheme, texts, model.threads, made)
        (made / DESCRIPTION).write_text(json.dumps(found), encoding="utf-8")

    made = cache.find_or_make("static", key, make)
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns(cache.SIZES, DESCRIPTION))
    found: dict[str, Any] = json.loads((made / DESCRIPTION).read_text(encoding="utf-8"))
    return found
