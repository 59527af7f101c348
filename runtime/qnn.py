"""Qualcomm's SoCs as their QNN knows them, and the simulator that stands in for them on x86-64."""

from __future__ import annotations

import platform

from omnidraft.runtime.errors import OmniDraftError

# QNN's numbers of chips whose HTP computes float16 as well as integers.
SOCS = {"SM8450": 36, "SM8550": 43, "SM8650": 57, "X-Elite": 60, "SM8750": 69, "SM8850": 87}
SIMULATOR, SIMULATED = "simulator", "SM8650"


def soc_model(soc: str) -> int:
    """QNN's number of a SoC by its name; the simulator is taken for an SM8650. Raises OmniDraftError if unknown."""
    found = SOCS.get(SIMULATED if soc == SIMULATOR else soc)
    if found is None:
        raise OmniDraftError(f"QNN has no SoC {soc!r} here; choose from {', '.join((*SOCS, SIMULATOR))}")
    return found


def simulated() -> bool:
    """Whether QNN's packages bring a simulator of the HTP to this machine in place of its driver."""
    return platform.machine() in ("x86_64", "AMD64")


def qnn_settings() -> dict[str, str]:
    """What QNN is told unless a wish says otherwise."""
    # Without the second, quantizing inputs and outputs stays on the CPU. A device knows its own SoC.
    settings = {"backend_type": "htp", "offload_graph_io_quantization": "0"}
    return {**settings, "soc_model": str(soc_model(SIMULATOR))} if simulated() else settings
