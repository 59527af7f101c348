"""Some hundred inputs for every parser; `run.py` has the long runs."""

from __future__ import annotations

import sys

import pytest
from parsers import CONTROLS, PARSERS, corpus
from run import fuzz

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and resource limits")


@pytest.mark.parametrize("name", PARSERS)
def test_no_input_raises_hangs_or_takes_much_memory(name: str) -> None:
    assert fuzz(name, seed=1, begin=0, executions=300, out=None) == 0


@pytest.mark.parametrize("name", PARSERS)
def test_the_corpus_is_small_and_some_of_it_is_good(name: str, tmp_path: pytest.TempPathFactory) -> None:
    seeds = corpus(name)
    assert all(len(seed) < 10_000 for seed in seeds)
    assert name in ("adapters", "learning") or any(PARSERS[name].run(seed, tmp_path) for seed in seeds)  # name files


@pytest.mark.parametrize("name", CONTROLS)
def test_control_faults_are_found(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz(name, seed=0, begin=0, executions=1, out=None) == 1
    assert name.removeprefix("control-") in capfd.readouterr().out
