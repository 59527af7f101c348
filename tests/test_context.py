"""The drafter's context is the text in its own spelling, whatever pieces it came in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from conftest import NOWHERE, Loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnidraft.runtime.context import DraftContext
from omnidraft.runtime.drafting import draft
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.translation import Mode, Translation

pytestmark = pytest.mark.model
TEXT = (
    "Let's count: 12 cats have 48 legs.\n\n- naïve café 🐈‍⬛ and 猫咪 eat\n"
    "    for i in range(10):\n        print(i)\n  done"
)
PREFIX = [1, 50, 51, 2]


def make(pair: Loaded, limit: int = 512) -> DraftContext:
    assert pair.pair.drafter is not None
    return DraftContext(pair.pair.drafter.decoder, pair.pair.drafter.tokens, limit, PREFIX)


@given(cuts=st.sets(st.integers(1, len(TEXT.encode()) - 1)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spelling_does_not_depend_on_the_pieces(loaded: dict[str, Loaded], cuts: set[int]) -> None:
    """Bytes may be cut in the middle of characters; the ids end up as the tokenizer gives the whole text."""
    data, context = TEXT.encode(), make(loaded["int8"])
    borders = [0, *sorted(cuts), len(data)]
    for begin, end in pairwise(borders):
        context.commit([data[begin:end]])
    assert loaded["int8"].pair.drafter is not None
    assert context.ids == PREFIX + loaded["int8"].pair.drafter.tokens.encode(data)


def test_logits_are_those_of_a_fresh_context(loaded: dict[str, Loaded]) -> None:
    """Rolling back and feeding only what changed gives what feeding everything gives."""
    data = TEXT.encode()
    context = make(loaded["int8"])
    for i in range(0, len(data), 3):
        context.commit([data[i : i + 3]])
        path = (7, 8) if i % 2 else ()
        context.logits(path)
    rows = [context.logits(path).copy() for path in ((), (5,), (5, 6), (9,))]
    fresh = make(loaded["int8"])
    fresh.commit([data])
    for row, path in zip(rows, ((), (5,), (5, 6), (9,)), strict=True):
        np.testing.assert_allclose(row, fresh.logits(path), atol=0.1)  # kernels differ by width
        assert int(row.argmax()) == int(fresh.logits(path).argmax())


def test_spellings_of_the_pieces_are_reported(loaded: dict[str, Loaded]) -> None:
    context = make(loaded["int8"])
    assert loaded["int8"].pair.drafter is not None
    tokens = loaded["int8"].pair.drafter.tokens
    pieces = [b"The", b" unbelievably", b" \xf0\x9f", b"\x90\x88"]
    for piece, spelling in zip(pieces, context.commit(pieces), strict=True):
        assert spelling == () or b"".join(tokens.bytes_of[d] or b"" for d in spelling) == piece


def test_text_longer_than_the_window_slides(loaded: dict[str, Loaded]) -> None:
    context = make(loaded["int8"], limit=256)
    for _ in range(300):
        context.commit([b" some", b" words"])
        context.logits(())
    assert len(context.ids) <= 256
    assert loaded["int8"].pair.drafter is not None
    tail = b" some words" * 20
    assert context.ids[-40:] == loaded["int8"].pair.drafter.tokens.encode(tail)[-40:]


def test_acceptance_is_not_below_teacher_forced_accuracy(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    """Following the text round by round costs the drafter nothing against reading it whole (k = 1).

    Compared at the positions where a round began: after an accepted proposal the bonus token is not
    proposed, so a run at k = 1 visits more of the hard positions than a walk over all of them.
    """
    pair, right, accepted, proposed = loaded["int8"], 0, 0, 0
    assert pair.pair.drafter is not None and pair.pair.vocabulary is not None
    engine = Engine(pair.pair, Options("1", mode=Mode.STATIC), NOWHERE, pair.calibration)
    translation, drafter = Translation(pair.pair.vocabulary, Mode.STATIC), pair.pair.drafter
    for prompt in [*prompts[:4], *prompts[10:24:2]]:
        chunks = list(engine.stream(prompt, Sampling(), 64))
        prefix = drafter.prompts.chat([{"role": "user", "content": prompt}])
        pieces = [pair.pair.target.tokens.bytes_of[chunk.token] or b"" for chunk in chunks]
        i = 1
        while i < len(chunks):
            context = DraftContext(drafter.decoder, drafter.tokens, drafter.info.context, prefix)
            context.commit([b"".join(pieces[:i])])
            made = draft(context, translation, Sampling(), i, 1, pair.pair.target.info.stop_ids)
            right += made.tokens[:1] == [chunks[i].token]
            accepted += chunks[i].from_draft
            proposed += 1
            i += 2 if chunks[i].from_draft else 1
    assert proposed > 300
    assert accepted / proposed >= right / proposed - 0.02, (accepted, right, proposed)
