"""Writes noise.json and rounds.json: what any implementation of the loop must reproduce.

    python tests/golden/make_rounds.py

Run it only when the definition changes; the tests compare the code with the committed files.
A round holds the drafter as a table from paths of draft tokens to logits, so that no model is
needed: `map.pieces` and `map.spelling` as in vocabulary.json, `proposals` as [token, kind, path].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.drafting import draft
from omnidraft.runtime.noise import gumbel
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.translation import Translation
from omnidraft.runtime.verification import verify
from omnidraft.runtime.vocabulary import VocabularyMap

HERE = Path(__file__).parent
# Five draft tokens for eight target tokens: direct twins 0-2, one split (3), one end token (4);
# merges that share a head and contain each other.
PIECES: list[tuple[int, ...]] = [(0,), (1,), (2,), (1, 2), (7,)]
SPELLING: list[tuple[int, ...]] = [(0,), (1,), (2,), (0, 1), (0, 1, 2), (0, 2), (2, 0), (4,)]


class Table:
    """A DraftModel that remembers which paths were asked for."""

    room = 1000

    def __init__(self, seed: int) -> None:
        self.seed, self.rows = seed, dict[tuple[int, ...], list[float]]()

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        """Random logits with three decimals, the same for the same path."""
        rng = np.random.default_rng([self.seed, len(path), *path])
        row = rng.normal(size=len(PIECES)) * 2
        row[(path[-1] + 1) % 3 if path else 0] += 2  # a drafter that likes the spelling of merges
        self.rows[path] = [round(float(x), 3) for x in row]
        return np.array(self.rows[path], np.float32)


def noise_cases() -> list[dict[str, Any]]:
    """Noise at small, large and neighbouring counters."""
    counters = [(0, 0), (0, 1), (1, 0), (42, 1000), (2**32, 5), (5, 2**32), (2**64 - 1, 2**64 - 1)]
    ids = [0, 1, 2, 255, 49151, 151935, 2**31]
    return [{"seed": s, "position": n, "ids": ids, "gumbel": gumbel(s, n, np.array(ids)).tolist()} for s, n in counters]


def round_cases() -> list[dict[str, Any]]:
    """Draft rounds and the verification of each, greedy and sampled, with truncations and a penalty."""
    samplings = [
        Sampling(),
        Sampling(1.0, seed=1),
        Sampling(0.7, seed=2),
        Sampling(0.7, top_k=3, seed=3),
        Sampling(1.3, top_p=0.8, seed=4),
        Sampling(1.0, min_p=0.1, repetition_penalty=1.3, seed=2**64 - 1),
    ]
    cases = []
    for number in range(24):
        sampling, k, position = samplings[number % len(samplings)], 1 + number % 5, 10 * number
        table = Table(number)
        translation = Translation(VocabularyMap(PIECES, SPELLING))
        made = draft(table, translation, sampling, position, k, (7,))
        history = [number % 7, (number + 3) % 7]
        rng = np.random.default_rng([99, number])
        rows = np.round(rng.normal(size=(len(made.proposals) + 1, len(SPELLING))) * 2, 3).astype(np.float32)
        for i, token in enumerate(made.tokens[: number % 4]):
            rows[i, token] += 9  # so that some proposals are accepted
        verdict = verify(rows, made.tokens, history, sampling, position)
        cases.append(
            {
                "sampling": vars(sampling),
                "position": position,
                "k": k,
                "ends": [7],
                "draft_logits": [[list(path), row] for path, row in table.rows.items()],
                "proposals": [[p.token, str(p.kind), list(p.path)] for p in made.proposals],
                "history": history,
                "target_logits": [[round(float(x), 3) for x in row] for row in rows],
                "tokens": verdict.tokens,
                "accepted": verdict.accepted,
            }
        )
    return cases


if __name__ == "__main__":
    noise = {"about": "g = gumbel(seed, position, id), see runtime/noise.py", "cases": noise_cases()}
    (HERE / "noise.json").write_text(json.dumps(noise, indent=1) + "\n")
    rounds = {"map": {"pieces": PIECES, "spelling": SPELLING}, "cases": round_cases()}
    (HERE / "rounds.json").write_text(json.dumps(rounds) + "\n")
