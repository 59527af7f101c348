"""Placement: what a report says about where a graph runs is counted, and nothing falls back in silence."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conftest import Loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from test_cli import QUESTION, fails, omnidraft

from omnidraft.runtime import placement
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.graph_inputs import UNKNOWN, dynamic_inputs, graph_inputs
from omnidraft.runtime.options import Options
from omnidraft.runtime.placed import CPU, Placed, describe, warnings
from omnidraft.runtime.placement import PROVIDERS, Provider, Unavailable, Wish, devices, open_session, read_wishes
from omnidraft.runtime.sampling import Sampling

AZURE = "AzureExecutionProvider"
HERE = ort.get_available_providers()


def absent() -> list[str]:
    """Names of the providers that are not installed here."""
    found = []
    for ep, provider in PROVIDERS.items():
        try:
            devices(ep)
        except Unavailable as reason:
            found += [ep] if provider.remedy in str(reason) else []
    return found


ABSENT = absent()


def write_graph(path: Path, *shapes: Any) -> Path:
    """y = relu(x w) with x of the first shape; further inputs of other shapes are not used."""
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i, shape in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16.0))
    nodes = [helper.make_node("MatMul", ["x0", "w"], ["h"], "product"), helper.make_node("Relu", ["h"], ["y"], "y")]
    graph = helper.make_graph(nodes, "tiny", inputs, [output], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.fixture
def static(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "static.onnx", [1, 4])


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "dynamic.onnx", ["rows", 4])


def place(model: Path, ep: str, strict: bool = False) -> Placed:
    return open_session(model, quiet, Wish(ep, strict))[1]


def quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def refused(model: Path, ep: str, strict: bool = True) -> str:
    """The one line of a wish that is not granted."""
    with pytest.raises(OmniDraftError) as error:
        place(model, ep, strict)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(model))
    return str(error.value)


@pytest.mark.parametrize("ep", ["auto", "cpu"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_cpu_runs_everything_where_it_is_asked_for(dynamic: Path, ep: str, strict: bool) -> None:
    assert place(dynamic, ep, strict) == Placed(ep, CPU, {CPU: 1.0})


def test_onnxruntime_itself_falls_back_with_a_warning_at_most(static: Path) -> None:
    """The control: what these checks are for."""
    wanted = PROVIDERS[ABSENT[0]].name
    with pytest.warns(UserWarning, match=wanted):
        session = ort.InferenceSession(static, providers=[wanted, CPU])
    assert session.get_providers() == [CPU]


@pytest.mark.parametrize("ep", ABSENT)
def test_a_provider_that_is_not_there_is_the_cpu_and_a_reason(static: Path, ep: str) -> None:
    placed = place(static, ep)
    assert (placed.requested, placed.actual, placed.share) == (ep, CPU, {CPU: 1.0})
    (line,) = warnings({"target": placed, "drafter": placed})
    assert line.startswith(f"target and drafter: asked for {ep}, on the CPU because ")
    assert PROVIDERS[ep].remedy in line and "\n" not in line
    assert PROVIDERS[ep].remedy in refused(static, ep)


def test_reasons_that_differ_are_lines_of_their_own() -> None:
    placed = {"target": Placed("qnn", CPU, {CPU: 1.0}, "one"), "drafter": Placed("qnn", CPU, {CPU: 1.0}, "two")}
    assert warnings(placed) == ["target: asked for qnn, one", "drafter: asked for qnn, two"]
    assert warnings({"target": Placed("auto", CPU, {CPU: 1.0})}) == []
    taken_over = {
        name: replace(where, why="one", instead=graph)
        for (name, where), graph in zip(placed.items(), "ab", strict=True)
    }
    assert warnings(taken_over) == ["target and drafter: asked for qnn, one; running instead: target a, drafter b"]


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that is really there and takes none of our nodes: it makes `get_providers()` lie."""
    if AZURE not in HERE:
        pytest.skip(f"this build of ONNX Runtime has no {AZURE}")
    monkeypatch.setattr(placement, "NAMES", (*placement.NAMES, "azure", "azure-static"))
    monkeypatch.setitem(PROVIDERS, "azure", Provider(AZURE))
    monkeypatch.setitem(PROVIDERS, "azure-static", Provider(AZURE, static=True))


@pytest.mark.usefixtures("azure")
def test_a_provider_that_takes_no_node_is_found_out(static: Path) -> None:
    session, placed = open_session(static, quiet, Wish("azure"))
    assert session.get_providers()[0] == AZURE, "the control: this is what would have been reported"
    assert (placed.actual, placed.share) == (CPU, {CPU: 1.0})
    left = f"2 of 2 nodes (1 MatMul, 1 Relu: product, y) are on {CPU}"
    assert placed.why == f"{left}; --strict-ep refuses that"
    assert refused(static, "azure") == f"{static}: asked for azure, {left}; without --strict-ep the CPU helps out"


def test_nodes_are_counted_by_kind_and_the_first_are_named() -> None:
    @dataclass
    class Node:
        op_type: str
        name: str

    many = [Node("Trilu", f"mask_{i}") for i in range(4)] + [Node(op, "") for op in ("Range", "Where", "Where", "Cast")]
    assert describe(many) == "4 Trilu, 2 Where, 1 Range and 1 more: mask_0, mask_1, mask_2 and 1 more"
    assert describe(many[4:5]) == "1 Range", "some graphs name no nodes"


@pytest.mark.usefixtures("azure")
def test_a_provider_of_fixed_shapes_is_not_given_others(static: Path, dynamic: Path) -> None:
    assert "'x0' is not fixed; use --ep cpu" in refused(dynamic, "azure-static", strict=False)
    assert "'x0' is not fixed; use --ep cpu" in refused(dynamic, "azure-static", strict=True)
    assert place(static, "azure-static").actual == CPU


@pytest.mark.skipif("nnapi" not in ABSENT, reason="nnapi is here")
def test_what_is_absent_and_would_not_fit_is_said_at_once(dynamic: Path) -> None:
    why = place(dynamic, "nnapi").why
    assert PROVIDERS["nnapi"].remedy in why and "'x0' is not fixed" in why


@pytest.mark.parametrize("ep", ["cpu", *ABSENT])
def test_a_file_that_is_no_graph_is_named(tmp_path: Path, ep: str) -> None:
    for content in (b"", b"not a graph", b"\x3a\xff\xff\xff\xff\x0f"):
        (tmp_path / "model.onnx").write_bytes(content)
        assert "export again" in refused(tmp_path / "model.onnx", ep, strict=False)


def test_wishes_are_read_for_both_models_or_for_each() -> None:
    def names(text: str) -> tuple[str, str]:
        found = read_wishes(text)
        return found.target.ep, found.drafter.ep

    assert names("qnn") == ("qnn", "qnn")
    assert names("target=qnn,drafter=cpu") == ("qnn", "cpu")
    assert names("drafter=qnn, target = cpu") == ("cpu", "qnn")
    assert names("drafter=nnapi") == ("auto", "nnapi")
    strict = read_wishes("drafter=nnapi", strict=True)
    assert strict.target.strict and strict.drafter.strict


@pytest.mark.parametrize("text", ["", "gpu", "qnn,cpu", "QNNExecutionProvider", "target=gpu", "target=", "head=cpu",
                                  "target=cpu,target=qnn", "target=cpu,"])  # fmt: skip
def test_other_wishes_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(OmniDraftError, match=r"^--ep ") as error:
        read_wishes(text)
    assert "\n" not in str(error.value)


shapes = st.lists(st.one_of(st.integers(0, 2**40), st.sampled_from(["batch", "é"]), st.none()), max_size=5)


@settings(deadline=None)
@given(found=st.lists(shapes, min_size=1, max_size=4))
def test_inputs_are_read_as_onnx_reads_them(found: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_graph(tmp_path_factory.mktemp("inputs") / "model.onnx", *found)
    expected = {f"x{i}": tuple(UNKNOWN if d is None else d for d in shape) for i, shape in enumerate(found)}
    assert graph_inputs(model) == expected
    symbols = [name for name, shape in expected.items() if any(isinstance(d, str) for d in shape)]
    assert dynamic_inputs(model) == symbols


@settings(deadline=None)
@given(data=st.data())
def test_damaged_graphs_are_no_traceback(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = write_graph(tmp_path_factory.mktemp("whole") / "model.onnx", ["rows", 4]).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("damaged") / "model.onnx"
    path.write_bytes(data.draw(st.sampled_from([whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]])))
    try:
        graph_inputs(path)
    except OmniDraftError as error:
        assert "export again" in str(error)


@pytest.mark.model
def test_reports_name_what_was_asked_for_and_what_ran(bundle: Path) -> None:
    engine = Engine.open(bundle, options=Options("2"), wishes=read_wishes("target=cpu"), warn=pytest.fail)
    report = engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=4)
    assert report.placement == {"target": Placed("cpu", CPU, {CPU: 1.0}), "drafter": Placed("auto", CPU, {CPU: 1.0})}
    assert report.providers == {"target": CPU, "drafter": CPU}
    plain = Engine.open(bundle, options=Options("off")).generate(QUESTION, sampling=Sampling(), max_new_tokens=4)
    assert set(plain.placement) == {"target"} and plain.tokens == report.tokens


@pytest.mark.model
def test_a_pass_that_fails_names_its_provider(loaded: dict[str, Loaded]) -> None:
    drafter = loaded["fp32"].pair.drafter
    assert drafter is not None
    drafter.decoder.rollback(0)
    with pytest.raises(OmniDraftError, match=f"{CPU} failed in a pass"):
        drafter.decoder.run([drafter.decoder.vocabulary + 7])


@pytest.mark.model
@pytest.mark.skipif("qnn" not in ABSENT, reason="qnn is here")
def test_the_command_says_where_it_ran(bundle: Path) -> None:
    run = ("run", bundle, QUESTION, "--max-new-tokens", "4", "--no-state", "--draft", "2")
    done = omnidraft(*run, "--ep", "cpu", "--strict-ep", "--verbose")
    assert done.returncode == 0, done.stderr
    assert f"on {CPU} (100.0% of the nodes), asked for cpu, drafter on {CPU} (100.0%" in done.stderr
    done = omnidraft(*run, "--ep", "qnn", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("omnidraft: target and drafter: asked for qnn, on the CPU because onnxruntime-qnn is not")
    placed = json.loads(done.stdout)["placement"]
    assert {(p["requested"], p["actual"], p["share"][CPU]) for p in placed.values()} == {("qnn", CPU, 1.0)}
    assert "pip install onnxruntime-qnn" in fails(*run, "--ep", "drafter=qnn", "--strict-ep")
    assert "no such provider" in fails(*run, "--ep", "gpu")
