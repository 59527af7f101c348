"""Static graphs compiled for Snapdragon, and run on Qualcomm's HTP simulator: its numbers, not its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import simulator

from omnidraft.export.qnn_context import compile_contexts
from omnidraft.runtime.errors import OmniDraftError

pytest.importorskip("torch")
QNN = "QNNExecutionProvider"
DESCRIPTION = {"widths": {"1": "s1.onnx"}}


@pytest.fixture(scope="module")
def facts(qnn: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulator.facts(qnn, "qnn_context_facts.py", tmp_path_factory.mktemp("contexts"))


@simulator.needed
def test_float_graphs_are_float16_on_the_simulator_with_equal_rows_from_three_on(facts: dict[str, Any]) -> None:
    found = facts["float"]
    assert found["share"] == {QNN: 1.0}
    assert 1e-4 < found["difference"] < 0.02, "no difference at all would mean that both were the CPU"
    assert found["agreement"] > 0.95 and found["equal across widths"] and found["exact width"] == 3


@simulator.needed
def test_quantized_graphs_have_equal_rows_within_one_width(facts: dict[str, Any]) -> None:
    """Which is what text with drafting needs to be text without; across widths they differ, and that is no W₀."""
    found = facts["a16w8"]
    assert found["share"] == {QNN: 1.0} and found["difference"] < 0.1 and found["agreement"] > 0.9
    assert not found["equal across widths"] and found["exact width"] == 3


@simulator.needed
def test_an_adapter_works_in_a_compiled_drafter_and_leaves_nothing(facts: dict[str, Any]) -> None:
    found = facts["adapter"]
    assert found["effect"] > 1 and found["difference"] < 0.05 * found["effect"] and found["left"] == 0


@simulator.needed
def test_widths_share_a_binary_for_a_soc_and_have_their_own_for_the_simulator(facts: dict[str, Any]) -> None:
    shared, alone = facts["SM8650"], facts["simulator"]
    assert shared["named"] == shared["qnn"]["binaries"] * 3 == ["s1_qnn.bin"] * 3 and shared["qnn"]["shared"]
    assert alone["named"] == alone["qnn"]["binaries"] and len(set(alone["named"])) == 3 and not alone["qnn"]["shared"]
    assert shared["bytes"] < alone["bytes"] / 2
    assert shared["static"] == alone["static"], "what the runtime is told is the same"


@simulator.needed
def test_the_compatibility_line_names_the_soc(facts: dict[str, Any]) -> None:
    for soc, number in (("SM8650", 57), ("X-Elite", 60), ("simulator", 57)):
        assert facts[soc]["qnn"]["compatibility"].split(":")[-3] == str(number)


@simulator.needed
def test_nothing_of_a_compilation_that_failed_gets_into_the_next(facts: dict[str, Any]) -> None:
    assert facts["Trilu"].endswith("s1.onnx: 1 nodes (1 Trilu) do not run on SM8650; use another profile")
    for soc in ("SM8650", "SM8650 again", "X-Elite", "simulator"):
        assert facts[soc]["held"] == facts[soc]["asked"] and len(set(facts[soc]["held"])) == 3, "three widths, no more"


@simulator.needed
@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_a_damaged_binary_is_one_line(facts: dict[str, Any], damage: str) -> None:
    assert "s1.onnx: asked for qnn, " in facts[damage] and "\n" not in facts[damage]


def test_a_soc_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OmniDraftError, match=r"^QNN has no SoC 'SM1' here; choose from SM8450, .*, simulator$"):
        compile_contexts(tmp_path, DESCRIPTION, "SM1", tmp_path / "out")


@simulator.missing
def test_compiling_needs_the_package(tmp_path: Path) -> None:
    missing = r"^.*s1\.onnx: cannot be compiled for SM8650: onnxruntime-qnn is not installed: pip install .*$"
    with pytest.raises(OmniDraftError, match=missing):
        compile_contexts(tmp_path, DESCRIPTION, "SM8650", tmp_path / "out")
