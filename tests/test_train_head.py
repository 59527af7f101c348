"""The verb that teaches the acceptance head, on the real pair and a few prompts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft.models import registry
from omnidraft.runtime.acceptance import HEAD_FILE, check
from omnidraft.runtime.adapter_file import load_adapter

pytestmark = pytest.mark.model


def train_head(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnidraft.tools.cli", "train-head", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_it_writes_a_head_and_says_how_good_it_is(bundle: Path, prompts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    shutil.copy(registry.locate("default") / "config.json", folder)
    asked = Path(__file__).parent / "prompts.jsonl"
    few = ("--prompts", asked, "--n", 3, "--max-new-tokens", 24, "--plot", tmp_path / "curve.svg")
    done = train_head(bundle, *few, "--out", folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "proposals learned" in lines[0] and all("ECE" in line and "bias" in line for line in lines[1:4])
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    check(load_adapter(folder / HEAD_FILE), 256)


def test_bad_input_is_one_clear_line(bundle: Path, tmp_path: Path) -> None:
    asked = tmp_path / "few.jsonl"
    asked.write_text('{"prompt": "a"}\n')
    for arguments, why in (
        ((bundle, "--prompts", asked, "--out", tmp_path / "none"), "no such folder"),
        ((bundle, "--prompts", asked, "--out", tmp_path), "at least 5 prompts"),
        ((tmp_path, "--prompts", asked, "--out", tmp_path), "at least 5 prompts"),
    ):
        done = train_head(*arguments)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and why in done.stderr
