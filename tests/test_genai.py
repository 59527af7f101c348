"""Plain decoding is that of onnxruntime-genai: the same graph, the same tokens."""

from __future__ import annotations

import pytest
from conftest import PRECISIONS, Loaded

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.genai import Genai

pytestmark = pytest.mark.model
ARGUMENTS = {"max_new_tokens": 24, "stop": (), "raw": False}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_row_plain_decoding_says_what_genai_says(
    loaded: dict[str, Loaded], prompts: list[str], precision: str
) -> None:
    plain = loaded[precision].engine("off", lossless="near")
    rival = Genai(plain)
    for prompt in prompts[:3]:
        expected = plain.generate(prompt, sampling=Sampling(), max_new_tokens=24)
        got = rival.generate(prompt, sampling=Sampling(), **ARGUMENTS)
        assert got.tokens == expected.tokens
        assert got.completion_tokens == expected.completion_tokens and got.tokens_per_second


def test_it_says_what_it_cannot_compare(loaded: dict[str, Loaded], prompts: list[str]) -> None:
    rival = Genai(loaded["int8"].engine("off"))
    with pytest.raises(OmniDraftError, match="greedy"):
        rival.generate(prompts[0], sampling=Sampling(0.7), **ARGUMENTS)
