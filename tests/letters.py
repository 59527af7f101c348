"""A drafter's and a target's tokenizer of a few letters, small enough to know every label by its definition."""

from __future__ import annotations

from functools import cache

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnidraft.adapters.projection import starts
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.runtime.observation import TOP, Observation
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import build_map

END = "<|im_end|>"
DRAFTS = ["a", "b", "c", "ab"]
TARGETS = ["a", "b", "c", "ab", "bc", "abc", "cab", "abcab", "d"]
DRAFT_END, TARGET_END = len(DRAFTS), len(TARGETS)


def tokens(vocabulary: list[str], merges: list[tuple[str, str]]) -> TokenBytes:
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return TokenBytes(tokenizer.to_str().encode(), "letters")


@cache
def both() -> tuple[TokenBytes, TokenBytes]:
    """The drafter's tokens, and the target's; only the target knows a d."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "ab"), ("abc", "ab")]
    return tokens(DRAFTS, merges[:1]), tokens(TARGETS, merges)


def spelling(positions: int | None = None) -> Spelling:
    draft, target = both()
    return Spelling(draft, target, build_map(draft, target), len(DRAFTS) + 1, positions)


def observed(said: list[int], seed: int = 0, missing: float = 0.0) -> Observation:
    """A response with random laws over all target tokens; `missing`: the mass that is not among the likeliest."""
    rng = np.random.default_rng(seed)
    seen = Observation([DRAFT_END], b"ca")
    for _ in said:
        law = (1 - missing) * rng.dirichlet(np.full(len(TARGETS) + 1, 0.7))
        ids = rng.permutation(len(law))
        seen.tops.append((ids.astype(np.int32), law[ids].astype(np.float32)))
    seen.tokens += said
    return seen


def dense(sample: Sample) -> np.ndarray:
    """The target's probabilities [n, tokens] as the sample has them."""
    found = np.zeros((len(sample.target), len(TARGETS) + 1))
    for row in range(len(found)):
        np.add.at(found[row], sample.top_ids[row], sample.top_p[row].astype(np.float64))
    assert sample.top_ids.shape[1] == TOP
    return found


def begins(sample: Sample) -> tuple[list[int], list[int]]:
    """The byte at which each draft token and each target token of the answer begins."""
    draft, target = both()
    answer = [draft.bytes_of[d] for d in sample.draft[sample.begin :].tolist()]
    said = [target.bytes_of[t] for t in sample.target.tolist()]
    return starts(answer).tolist(), starts(said).tolist()
