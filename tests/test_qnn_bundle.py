"""Bundles with graphs compiled for QNN, on its HTP simulator: split placements, equal texts, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulator
from test_cli import fails

from omnidraft.export.order import Order, check, read_profiles
from omnidraft.runtime.compiled import BEST, GOOD, UNKNOWN, choose
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.pair import load_pair
from omnidraft.runtime.placed import CPU, warnings
from omnidraft.runtime.placement import Unavailable, read_wishes
from omnidraft.runtime.qnn import soc_model

pytest.importorskip("torch")
QNN = "QNNExecutionProvider"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def facts(qnn: Path, folder: Path) -> dict[str, Any]:
    return simulator.facts(qnn, "qnn_bundle_facts.py", folder)


def compiled_graphs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [graph for graph in manifest["targets"]["one"]["graphs"] if "qnn" in graph]


@simulator.needed
def test_what_export_writes(facts: dict[str, Any]) -> None:
    """Compiled graphs of target and drafter, and the static ones that they were made from only if asked for."""
    bundle, shipped = (facts["manifests"][name] for name in ("bundle", "shipped"))
    labels = {
        name: [(graph["profile"], graph["precision"]) for graph in found["targets"]["one"]["graphs"]]
        for name, found in facts["manifests"].items()
    }
    static = [("static", "fp32"), ("static", "a16w8")]
    compiled = [(f"qnn:{soc}", kind) for soc in ("SM8550", "X-Elite", "simulator") for kind in ("fp16", "a16w8")]
    assert labels["bundle"] == [("cpu", "fp32"), *static, *compiled]
    assert labels["shipped"] == [("cpu", "fp32"), ("qnn:SM8550", "fp16"), ("qnn:X-Elite", "fp16")]
    assert [graph["profile"] for graph in shipped["drafter"]["graphs"]] == ["qnn:SM8550", "qnn:X-Elite"]
    for manifest, graph in ((found, graph) for found in (bundle, shipped) for graph in compiled_graphs(found)):
        soc = graph["qnn"]["soc"]
        assert graph["profile"] == "qnn:" + soc
        assert graph["qnn"]["compatibility"].split(":")[-3] == str(soc_model(soc)), "each has its own line"
        binaries = {f"{Path(graph['model']).parent}/{name}" for name in graph["qnn"]["binaries"]}
        assert binaries < manifest["files"].keys()
        assert len(binaries) == (1 if graph["qnn"]["shared"] else len(graph["static"]["widths"]))
    assert not any("/static-" in name for name in shipped["files"])


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
        ("one width", QNN, CPU),
        ("one width, a16w8", QNN, CPU),
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
@pytest.mark.parametrize("run", ["one width", "one width, a16w8"])
def test_the_fixed_width_fallback_has_one_width_behind_the_prompt(facts: dict[str, Any], run: str) -> None:
    """As measured where no W₀ is: every pass is padded to a width, and no draft is longer than it holds."""
    found, free = facts["runs"][run], facts["runs"]["both"]
    assert found["w0"] is None and found["width"] == 5
    prompts = set(found["rows"]) - {5}
    assert prompts and prompts < set(free["rows"]), "prompts are read as they always are"
    assert {2, 3, 4} & set(free["rows"]), "the control: with a W₀ passes have as many rows as they need"


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
        "; running instead: target fp32, drafter int8"
    ]
    assert f"asked for qnn, {reason}" in found["strict"]["refused"]


@simulator.needed
def test_the_simulator_is_no_other_soc_than_its_own(facts: dict[str, Any]) -> None:
    """Of all SoCs that the bundle has it was given its own above; another one's name is not passed over."""
    found = facts["a SoC by name"]
    reason = "this machine has QNN's simulator, which stands for an SM8650 and for no other SoC: leave its name out"
    assert found["lenient"]["actual"] == CPU and reason in found["lenient"]["warnings"][0]
    assert f"asked for qnn, {reason}" in found["strict"]["refused"]


@simulator.needed
def test_a_device_takes_the_graphs_of_the_soc_that_is_named(facts: dict[str, Any]) -> None:
    """With the simulator's presence denied, and ONNX Runtime's real answer that it cannot tell."""
    found = facts["elsewhere"]
    assert [found[ep] for ep in ("qnn:SM8550", "qnn:X-Elite")] == ["qnn:SM8550", "qnn:X-Elite"]
    assert "which of SM8550, X-Elite this is cannot be told: name it, as in --ep qnn:SM8550" in found["qnn"]
    assert "the bundle's graphs are for SM8550, X-Elite only: export for this SoC too" in found["qnn:SM8650"]


@simulator.needed
def test_a_damaged_binary_is_named(facts: dict[str, Any]) -> None:
    found = facts["damaged"]
    (line,) = found["lenient"]["warnings"]
    assert found["lenient"]["actual"] == CPU
    assert line.startswith("target: asked for qnn, on the CPU because ") and "_qnn.bin: changed since export" in line
    assert line.endswith("; running instead: target fp32")
    assert "_qnn.bin: changed since export" in found["strict"]["refused"]


@simulator.needed
@simulator.missing
@pytest.mark.parametrize(("asked", "taken"), [(None, "fp32"), ("fp16", "fp32"), ("a16w8", "a16w8, static")])
def test_without_the_plugin_the_cpu_takes_over_and_says_so(
    facts: dict[str, Any], folder: Path, asked: str | None, taken: str
) -> None:
    """With the precision that was asked for, where the CPU has it."""
    pair = load_pair(folder / "bundle", precision=asked, wishes=read_wishes("qnn"))
    assert {placed.actual for placed in pair.placement.values()} == {CPU} and pair.target.graph.label == taken
    reason = "onnxruntime-qnn is not installed: pip install onnxruntime-qnn"
    instead = f"; running instead: target {taken}, drafter int8"
    assert warnings(pair.placement) == [f"target and drafter: asked for qnn, on the CPU because {reason}{instead}"]
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


def test_profiles_given_one_by_one_are_all_read(tmp_path: Path) -> None:
    models = ("--drafter", "default", "--target", "one=qwen3-10m", "--out", tmp_path / "out")
    assert "--profile qnn:SM1: unknown here" in fails("export", *models, "--profile", "qnn:SM1", "--profile", "cpu")


def test_profiles_and_wishes_with_socs_are_read() -> None:
    assert read_profiles("cpu,qnn:SM8550,X-Elite,static") == ("cpu", "qnn:SM8550", "qnn:X-Elite", "static")
    assert read_profiles("cpu,qnn:SM8550,qnn:X-Elite") == ("cpu", "qnn:SM8550", "qnn:X-Elite")
    assert read_profiles("cpu,SM8550") == ("cpu", "SM8550"), "which is refused"
    assert read_wishes("target=qnn:SM8550,drafter=cpu").target.settings == {"soc_model": "43"}
    with pytest.raises(OmniDraftError, match=r"^QNN has no SoC 'SM1' here; choose from SM8450, .*$"):
        read_wishes("qnn:SM1")
    with pytest.raises(OmniDraftError, match=r"^--ep cpu:SM8550: only qnn has SoCs to choose from, as in qnn:SM8650$"):
        read_wishes("cpu:SM8550")
