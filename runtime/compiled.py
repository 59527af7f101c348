"""Which of a bundle's compiled graphs a device can take: those that were made for it, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnidraft.runtime.bundle import Bundle, Graph
from omnidraft.runtime.placement import Refused, Unavailable, Wish, compatibility, devices
from omnidraft.runtime.qnn import SIMULATED, SIMULATOR, SOCS, simulated, soc_model

# ONNX Runtime's verdicts on a compiled graph for the devices here; it has none where it does not know the device.
BEST, GOOD, UNKNOWN = "EP_SUPPORTED_OPTIMAL", "EP_SUPPORTED_PREFER_RECOMPILATION", "EP_NOT_APPLICABLE"


def wanted(graphs: Sequence[Graph], wish: Wish) -> bool:
    """Whether a wish is for compiled graphs, and there are any. Nobody is given a simulator without asking."""
    asked = wish.ep == "qnn" or (wish.ep == "auto" and not simulated())
    return asked and wish.profile == "auto" and any(graph.qnn for graph in graphs)


def profiles(graphs: Sequence[Graph], wish: Wish) -> list[str]:
    """Profiles that a wish may come to with these graphs, compiled ones first, without asking the device."""
    first = [graph.profile for graph in graphs if graph.qnn] if wanted(graphs, wish) else []
    return [*dict.fromkeys(first), *wish.profiles]


def fitting(bundle: Bundle, graphs: Sequence[Graph], wish: Wish) -> str:
    """The profile of those compiled graphs that this device can take.

    Raises Refused if there are none, or if QNN itself is not there.
    """
    try:
        devices("qnn")
        return _profile(bundle, graphs, wish)
    except Unavailable as reason:
        raise Refused(bundle.path, "qnn", str(reason)) from None


def choose(verdicts: Mapping[str, str]) -> str:
    """The SoC with the best of ONNX Runtime's verdicts; the simulator's graphs are an SM8650's, but larger.

    Raises Unavailable if none is said to fit, and if there is no saying.
    """
    verdicts = {soc: verdict for soc, verdict in verdicts.items() if soc != SIMULATOR} or verdicts
    for verdict in (BEST, GOOD):
        for soc, theirs in verdicts.items():
            if theirs == verdict:
                return soc
    unknown = [soc for soc, theirs in verdicts.items() if theirs == UNKNOWN]
    if len(unknown) == 1:
        return unknown[0]
    if unknown:
        raise Unavailable(f"which of {', '.join(unknown)} this is cannot be told: name it, as in --ep qnn:{unknown[0]}")
    raise Unavailable(f"the bundle's graphs are for {', '.join(verdicts)}, which this is not: export for its SoC")


def _profile(bundle: Bundle, graphs: Sequence[Graph], wish: Wish) -> str:
    first: dict[str, Graph] = {}
    for graph in graphs:
        if graph.qnn:
            first.setdefault(graph.qnn["soc"], graph)
    if simulated():
        soc = _of_simulator(first, wish)
    elif "soc_model" in wish.settings:
        soc = _named(first, wish.settings["soc_model"])
    else:
        soc = choose({soc: compatibility(bundle.path / graph.model, "qnn")[1] for soc, graph in first.items()})
    return first[soc].profile


def _of_simulator(socs: Mapping[str, Any], wish: Wish) -> str:
    here = "this machine has QNN's simulator"
    if wish.settings.get("soc_model", str(soc_model(SIMULATOR))) != str(soc_model(SIMULATOR)):
        raise Unavailable(f"{here}, which stands for an {SIMULATED} and for no other SoC: leave its name out")
    # A binary that widths share makes the simulator crash, so it must not be tried.
    if SIMULATOR not in socs:
        raise Unavailable(f"{here}, the bundle's graphs are for {', '.join(socs)}: export with --profile qnn:simulator")
    return SIMULATOR


def _named(socs: Mapping[str, Any], number: str) -> str:
    found = [soc for soc in socs if str(SOCS.get(soc)) == number]
    if not found:
        raise Unavailable(f"the bundle's graphs are for {', '.join(socs)} only: export for this SoC too")
    return found[0]
