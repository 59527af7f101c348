"""Placement on QNN for real: its simulator of Snapdragon's HTP, in a process and a package folder of its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import simulator

from omnidraft.runtime.placed import CPU

QNN = "QNNExecutionProvider"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not simulator.HERE, reason=simulator.REASON)]


@pytest.fixture(scope="module")
def facts(qnn: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulator.facts(qnn, "qnn_facts.py", tmp_path_factory.mktemp("graphs"))


def test_a_graph_that_fits_runs_on_qnn_node_by_node(facts: dict[str, Any]) -> None:
    assert facts["fits"] == {"requested": "qnn", "actual": QNN, "share": {QNN: 1.0}, "why": "", "instead": "",
                             "listed": [QNN, CPU]}  # fmt: skip
    assert 0 < facts["difference"] < 0.05, "fp16 on QNN, fp32 on the CPU: equal bits would mean that both were the CPU"


def test_nodes_that_are_left_to_the_cpu_are_counted_and_named(facts: dict[str, Any]) -> None:
    partly = facts["partly"]
    assert partly["share"] == {QNN: 0.75, CPU: 0.25}
    left = f"1 of 4 nodes (1 Trilu: h2) are on {CPU}"
    assert partly["actual"] == QNN and partly["why"] == f"{left}; --strict-ep refuses that"
    assert f"asked for qnn, {left}; without --strict-ep" in facts["partly, strict"]["refused"]


def test_a_missing_backend_is_found_out(facts: dict[str, Any]) -> None:
    assert facts["no backend"]["listed"][0] == QNN, "the control: what ONNX Runtime says itself"
    assert (facts["no backend"]["actual"], facts["no backend"]["share"]) == (CPU, {CPU: 1.0})
    assert "refused" in facts["no backend, strict"]


def test_a_provider_that_does_not_start_is_the_cpu_with_its_reason(facts: dict[str, Any]) -> None:
    found = facts["wrong settings"]
    assert (found["actual"], found["share"]) == (CPU, {CPU: 1.0})
    assert "does not take it" in found["why"] and found["why"].endswith("use --ep cpu")


def test_dynamic_shapes_are_refused_where_qnn_is_there(facts: dict[str, Any]) -> None:
    assert "'x' is not fixed; use --ep cpu" in facts["dynamic"]["refused"]


def test_a_compiled_graph_runs_and_says_what_it_was_made_for(facts: dict[str, Any]) -> None:
    assert Counter(facts["context"]["share"]) == {QNN: 1.0}
    made_for, verdict, *plain = facts["made for"]
    assert ":57:" in made_for and verdict.startswith("EP_")
    assert plain == ["", ""], "a graph that was not compiled says nothing"


def test_the_doctor_finds_the_package_and_its_devices(qnn: Path, tmp_path: Path) -> None:
    output = simulator.beside(
        qnn, "-m", "omnidraft.tools.cli", "doctor", "--json", "--state", tmp_path / "state"
    ).stdout
    found = json.loads(output)["found"]["providers"]["qnn"]
    assert found.startswith(f"{QNN} on ") and simulator.PACKAGE.replace("==", " ") in found
