"""Greedy answers of a bundle on one placement, as JSON: a program of its own, so that any processor can run it.

Usage: python one_bundle.py BUNDLE EP PROFILE DRAFT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.placement import read_wishes
from omnidraft.runtime.sampling import Sampling

PROMPTS = (
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Why is the sky blue?",
    "What are some business etiquette norms when doing business in Japan?",
    "Write a travel blog post about a recent trip to Hawaii.",
)
TOKENS = 32


def main(bundle: Path, ep: str, profile: str, draft: str) -> None:
    """Print the tokens of each answer, how many were drafted and accepted, the promise, and what each model ran on."""
    wishes = read_wishes(ep, strict=True, profile=profile)
    engine = Engine.open(bundle, options=Options(draft), threads=1, wishes=wishes)
    reports = [engine.generate(prompt, sampling=Sampling(), max_new_tokens=TOKENS) for prompt in PROMPTS]
    found = {
        "tokens": [report.tokens for report in reports],
        "accepted": sum(report.counts["accepted"] for report in reports),
        "promise": engine.lossless,
        "providers": reports[0].providers,
        "profiles": reports[0].profiles,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
