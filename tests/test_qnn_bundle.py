"""Bundles with graphs compiled for QNN, on its HTP simulator: split placements, equal texts, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulator

from omnidraft.export.order import Order, check, read_profiles
from omnidraft.runtime.compiled import BEST, GOOD, UNKNOWN, choose
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.pair import load_pair
from omnidraft.runtime.placement import CPU, Unavailable, read_wishes, warnings

pytest.importorskip("torch")
QNN = "QNNExecutionProvider"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def facts(qnn: Path, folder: Path) -> dict[str, Any]:
    return simulator.facts(qnn, "qnn_bundle_facts.py", folder)


@simulator.needed
def test_what_export_writes(facts: dict[str, Any]) -> None:
    """Compiled graphs of target and drafter, and none of the static ones that they were made from."""
    simulated, shipped = (facts["manifests"][name] for name in ("bundle", "shipped"))
    labels = {
        name: [(graph["profile"], graph["precision"]) for graph in found["targets"]["one"]["graphs"]]
        for name, found in facts["manifests"].items()
    }
    assert labels["bundle"] == [("cpu", "fp32"), ("qnn:simulator", "fp16"), ("qnn:simulator", "a16w8")]
    assert labels["shipped"] == [("cpu", "fp32"), ("qnn:SM8550", "fp16"), ("qnn:X-Elite", "fp16")]
    assert [graph["profile"] for graph in shipped["drafter"]["graphs"]] == ["qnn:SM8550", "qnn:X-Elite"]
    for manifest, number in ((simulated, 1), (shipped, 1), (shipped, 2)):
        graph = manifest["targets"]["one"]["graphs"][number]
        assert graph["profile"] == "qnn:" + graph["qnn"]["soc"]
        binaries = {f"{Path(graph['model']).parent}/{name}" for name in graph["qnn"]["binaries"]}
        assert binaries < manifest["files"].keys()
        assert len(binaries) == (1 if graph["qnn"]["shared"] else len(graph["static"]["widths"]))
        assert not any("/static-" in name for name in manifest["files"])


@simulator.needed
def test_the_simulators_figures_are_its_own(facts: dict[str, Any]) -> None:
    """A trained model, on the text of the parity gate. Where its greedy answer leaves the checkpoint's, that was close
    to another one; pytest -s shows the figures."""
    fp32, fp16 = facts["manifests"]["real"]["targets"]["one"]["graphs"]
    print(f"on the simulator: {fp16['parity']}")
    assert fp16["parity"]["max_logit_difference"] > 10 * fp32["parity"]["max_logit_difference"]
    assert fp16["parity"]["top1_agreement"] > 0.98
    margin = fp16["parity"]["greedy_margin"]
    assert margin is None or margin <= 2 * fp16["parity"]["max_logit_difference"]


@simulator.needed
@pytest.mark.parametrize(
    ("run", "target", "drafter"),
    [
        ("both", QNN, QNN),
        ("both, a16w8", QNN, QNN),
        ("target", QNN, CPU),
        ("drafter", CPU, QNN),
        ("trained", QNN, CPU),
    ],
)
def test_text_with_drafting_is_text_without(facts: dict[str, Any], run: str, target: str, drafter: str) -> None:
    """Greedy and sampled, under --strict-ep; every node of a model on the provider that was asked for."""
    found = facts["runs"][run]
    assert found["providers"] == {"target": {target: 1.0}, "drafter": {drafter: 1.0}}
    assert found["drafted"] == found["plain"] and found["accepted"] > 10
    assert found["w0"] or found["width"], "exact"


@simulator.needed
def test_a_targets_text_is_that_of_its_placement_whoever_drafts(facts: dict[str, Any]) -> None:
    assert facts["runs"]["both"]["plain"] == facts["runs"]["target"]["plain"]


@simulator.needed
def test_nobody_is_given_the_simulator_without_asking(facts: dict[str, Any]) -> None:
    for found in facts["auto"].values():
        assert found == {"profile": "cpu", "actual": CPU, "warnings": []}


@simulator.needed
def test_graphs_for_another_soc_are_not_tried(facts: dict[str, Any]) -> None:
    found = facts["another SoC"]
    reason = "this machine has QNN's simulator, the bundle's graphs are for SM8550, X-Elite: export with --profile "
    assert (found["lenient"]["actual"], found["lenient"]["profile"]) == (CPU, "cpu")
    assert found["lenient"]["warnings"] == [
        f"target and drafter: asked for qnn, on the CPU because {reason}qnn:simulator"
    ]
    assert f"asked for qnn, {reason}" in found["strict"]["refused"]


@simulator.needed
def test_a_damaged_binary_is_named(facts: dict[str, Any]) -> None:
    found = facts["damaged"]
    (line,) = found["lenient"]["warnings"]
    assert found["lenient"]["actual"] == CPU
    assert line.startswith("target: asked for qnn, on the CPU because ") and "_qnn.bin: changed since export" in line
    assert "_qnn.bin: changed since export" in found["strict"]["refused"]


@simulator.needed
@simulator.missing
def test_without_the_plugin_the_cpu_takes_over_and_says_so(facts: dict[str, Any], folder: Path) -> None:
    pair = load_pair(folder / "bundle", precision="fp16", wishes=read_wishes("qnn"))
    assert {placed.actual for placed in pair.placement.values()} == {CPU} and pair.precision == "fp32"
    reason = "onnxruntime-qnn is not installed: pip install onnxruntime-qnn"
    assert warnings(pair.placement) == [f"target and drafter: asked for qnn, on the CPU because {reason}"]
    with pytest.raises(OmniDraftError, match=f"^.*bundle: asked for qnn, {reason}; without --strict-ep"):
        load_pair(folder / "bundle", wishes=read_wishes("qnn", strict=True))


@simulator.needed
def test_the_commands_run_it_and_look_at_it(facts: dict[str, Any], qnn: Path, folder: Path) -> None:
    omnidraft, bundle = ("-m", "omnidraft.tools.cli"), folder / "bundle"
    options = ("--ep", "qnn", "--strict-ep", "--draft", "2", "--max-new-tokens", "6", "--no-state", "--verbose")
    told = simulator.beside(qnn, *omnidraft, "run", bundle, "The boat", *options).stderr
    assert f"target one (fp16) on {QNN} (100.0% of the nodes), asked for qnn" in told
    assert "graphs: target qnn:simulator, drafter qnn:simulator" in told and "· exact" in told
    looked = simulator.beside(qnn, *omnidraft, "doctor", bundle, "--json", "--state", folder / "state").stdout
    line = json.loads(looked.splitlines()[-1])["found"]["bundle"]["one, fp16, qnn:simulator"]
    assert line.startswith("compiled for simulator (v2:") and line.endswith("which cannot be compared with this device")


def test_the_best_verdict_of_onnx_runtime_chooses() -> None:
    assert choose({"SM8550": "EP_UNSUPPORTED", "SM8650": GOOD, "SM8750": BEST}) == "SM8750"
    assert choose({"SM8550": UNKNOWN, "SM8650": GOOD}) == "SM8650"
    assert choose({"SM8550": UNKNOWN, "SM8650": "EP_UNSUPPORTED"}) == "SM8550", "QNN itself refuses what is wrong"
    assert choose({"simulator": BEST, "SM8650": GOOD}) == "SM8650" and choose({"simulator": BEST}) == "simulator"
    with pytest.raises(Unavailable, match=r"^which of SM8550, SM8650 this is cannot be told: name it, as in --ep qnn:"):
        choose({"SM8550": UNKNOWN, "SM8650": UNKNOWN})
    with pytest.raises(Unavailable, match=r"^the bundle's graphs are for SM8550, which this is not: export for its"):
        choose({"SM8550": "EP_UNSUPPORTED"})


@simulator.missing
def test_exporting_for_qnn_says_what_it_needs(tmp_path: Path) -> None:
    order = Order("default", {"one": "qwen3-10m"}, tmp_path / "out", (), "int8", profiles=("cpu", "qnn:SM8650"))
    with pytest.raises(OmniDraftError, match=r"^--profile qnn:SOC needs the package onnxruntime-qnn: pip install "):
        check(order)
    with pytest.raises(OmniDraftError, match=r"^--profile qnn:SM1: unknown here; choose from .*qnn:SM8650, .*$"):
        check(replace(order, profiles=("cpu", "qnn:SM1")))


def test_profiles_and_wishes_with_socs_are_read() -> None:
    assert read_profiles("cpu,qnn:SM8550,X-Elite,static") == ("cpu", "qnn:SM8550", "qnn:X-Elite", "static")
    assert read_profiles("cpu,SM8550") == ("cpu", "SM8550"), "which is refused"
    assert read_wishes("target=qnn:SM8550,drafter=cpu").target.settings == {"soc_model": "43"}
    with pytest.raises(OmniDraftError, match=r"^QNN has no SoC 'SM1' here; choose from SM8450, .*$"):
        read_wishes("qnn:SM1")
    with pytest.raises(OmniDraftError, match=r"^--ep cpu:SM8550: only qnn has SoCs to choose from, as in qnn:SM8650$"):
        read_wishes("cpu:SM8550")
