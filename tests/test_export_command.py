"""The export verb: what it makes of its options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint

from omnidraft.export import cache, pipeline
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools import export as verb


def test_options_become_an_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    orders: list[pipeline.Order] = []
    monkeypatch.setattr(pipeline, "export", lambda order, _: orders.append(order))
    verb.export(
        "default", ["a=smollm2", "b=some/id=x"], tmp_path / "out", "int8, fp32", drafter_precision="int4", threads=2
    )
    targets = {"a": "smollm2", "b": "some/id=x"}
    assert orders == [pipeline.Order("default", targets, tmp_path / "out", ("int8", "fp32"), "int4", 2)]


def test_a_bundle_is_written_with_progress_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path / "cache")
    source = str(write_checkpoint(tmp_path / "small"))
    capsys.readouterr()
    verb.export(source, [f"one={source}"], tmp_path / "out", "fp32", drafter_precision="fp32")
    printed = capsys.readouterr()
    assert printed.out == "" and "5/5" in printed.err and "wrote" in printed.err
    assert list(open_bundle(tmp_path / "out").targets) == ["one"]


@pytest.mark.parametrize("targets", [["smollm2"], ["=smollm2"], ["a="], ["a=smollm2", "a=default"]])
def test_a_malformed_target_is_named(targets: list[str], tmp_path: Path) -> None:
    with pytest.raises(OmniDraftError, match="--target"):
        verb.export("default", targets, tmp_path / "out")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(verb, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(
        OmniDraftError, match=r"package gguf; in the clone run: pip install -c constraints.txt -e '\.\[export\]'$"
    ):
        verb.export("default", ["a=smollm2"], tmp_path / "out")
