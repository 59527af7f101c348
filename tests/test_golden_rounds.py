"""Draft rounds and verifications equal the committed golden vectors, which other implementations share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnidraft.runtime.drafting import draft
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.translation import Translation
from omnidraft.runtime.verification import verify
from omnidraft.runtime.vocabulary import VocabularyMap

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rounds.json").read_text())


class Recorded:
    room = 1000

    def __init__(self, rows: list[Any]) -> None:
        self.rows = {tuple(path): np.array(row, np.float32) for path, row in rows}

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        return self.rows[path]


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_round(case: dict[str, Any]) -> None:
    pieces, spelling = ([tuple(entry) for entry in GOLDEN["map"][name]] for name in ("pieces", "spelling"))
    translation = Translation(VocabularyMap(pieces, spelling))
    sampling = Sampling(**case["sampling"])
    made = draft(Recorded(case["draft_logits"]), translation, sampling, case["position"], case["k"], case["ends"])
    assert [[p.token, p.kind, list(p.path)] for p in made.proposals] == case["proposals"]
    rows = np.array(case["target_logits"], np.float32)
    verdict = verify(rows, made.tokens, case["history"], sampling, case["position"])
    assert (verdict.tokens, verdict.accepted) == (case["tokens"], case["accepted"])


def test_golden_rounds_cover_every_kind_and_outcome() -> None:
    kinds = {kind for case in GOLDEN["cases"] for _, kind, _ in case["proposals"]}
    assert kinds == {"direct", "merge", "split"}
    assert {case["accepted"] for case in GOLDEN["cases"]} >= {0, 1, 2}
