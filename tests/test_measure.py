"""What the bench says about a difference: an interval that holds the truth, and excludes zero only for a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from omnidraft.tools.measure import gain


def runs(emitted: np.ndarray, passes: np.ndarray) -> Any:
    return [SimpleNamespace(counts={"emitted": int(e), "passes": int(p)}) for e, p in zip(emitted, passes, strict=True)]


def test_the_interval_covers_the_true_difference() -> None:
    """Prompts differ much, the two runs on a prompt little: true means 1.5 and 1.4 tokens per verify."""
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        easy = rng.uniform(0.6, 1.4, 40)
        passes = np.full(40, 60)
        ours, theirs = rng.poisson(1.5 * easy * passes), rng.poisson(1.4 * easy * passes)
        found = gain(runs(ours, passes), runs(theirs, passes))
        assert found is not None
        low, middle, high = found
        assert low <= middle <= high and high - low < 0.3
        covered += low <= 0.1 * easy.mean() <= high
    assert 176 <= covered <= 199, covered


def test_a_run_against_itself_gains_nothing_and_one_prompt_says_nothing() -> None:
    same = runs(np.array([90, 120, 70]), np.array([60, 61, 62]))
    assert gain(same, same) == (0.0, 0.0, 0.0)
    assert gain(same[:1], same[:1]) is None
