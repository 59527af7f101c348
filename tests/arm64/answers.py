"""Answers of a bundle, as JSON: a program of its own, so that two processors can run it and be compared.

Usage: python answers.py BUNDLE PROFILE
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.placement import read_wishes
from omnidraft.runtime.sampling import Sampling

PROMPTS = ("How fast is the boat?", "When does water boil?", "Where is the market?")
LAWS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_k=40, seed=7)}
TOKENS = 24


def main(bundle: Path, profile: str) -> None:
    """Print the promise, and what each draft length and law of sampling gives: tokens by prompt, and acceptance."""
    found: dict[str, Any] = {"machine": platform.machine(), "tokens": {}, "accepted": {}, "proposed": {}}
    for draft in ("3", "off"):
        wishes = read_wishes("cpu", profile=profile)
        engine = Engine.open(bundle, options=Options(draft), threads=1, wishes=wishes)
        found["promise"] = engine.lossless
        for law, sampling in LAWS.items():
            reports = [engine.generate(prompt, sampling=sampling, max_new_tokens=TOKENS) for prompt in PROMPTS]
            name = f"{law}, draft {draft}"
            found["tokens"][name] = [report.tokens for report in reports]
            for count in ("accepted", "proposed"):
                found[count][name] = sum(report.counts[count] for report in reports)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
