"""The committed translations are reproduced, and they are worth reproducing."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
_spec = importlib.util.spec_from_file_location("make_translations", GOLDEN / "make_translations.py")
assert _spec is not None and _spec.loader is not None
make_translations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_translations)

CASES = json.loads((GOLDEN / "translations.json").read_text(encoding="utf-8"))


def test_translations_are_reproduced() -> None:
    made = json.loads(json.dumps(make_translations.translations()))
    assert made == CASES


@pytest.mark.parametrize("pair", make_translations.PAIRS, ids="->".join)
def test_every_kind_occurs_for_each_pair(pair: tuple[str, str]) -> None:
    seen: Counter[str] = Counter()
    for case in CASES:
        if (case["draft"], case["target"]) == pair:
            seen.update(case["draft_kinds"] + case["target_kinds"])
    assert min(seen[kind] for kind in ("direct", "merge", "split")) > 10


def test_bytes_agree_on_both_sides() -> None:
    tokens = {name: make_translations.load(name) for name in make_translations.TOKENIZERS}
    for case in CASES:
        text = bytes.fromhex(case["bytes"])
        assert tokens[case["draft"]].spells(case["draft_ids"], text)
        assert tokens[case["target"]].spells(case["target_ids"], text)
        assert tokens[case["target"]].spells([i for piece in case["pieces"] for i in piece], text)
