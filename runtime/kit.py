"""What an engine drafts with, put together from a pair, a user's options, what was measured, and the state."""

from __future__ import annotations

from dataclasses import dataclass

from omnidraft.runtime.cache_file import CacheFile
from omnidraft.runtime.calibration import Calibration
from omnidraft.runtime.lookup import LookUp
from omnidraft.runtime.ngram_cache import NgramCache
from omnidraft.runtime.options import Options
from omnidraft.runtime.outlook import Outlook
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.policy import CostAware, Fixed, Policy, Threshold
from omnidraft.runtime.proposer import Choice, Drafter
from omnidraft.runtime.state import State
from omnidraft.runtime.translation import Translation


@dataclass(frozen=True)
class Kit:
    """`cache` and its `file` are None where no n-grams are learned."""

    proposer: Choice
    cache: NgramCache | None
    file: CacheFile | None


def make_kit(
    pair: Pair, options: Options, calibration: Calibration, least_rows: int, width: int | None, state: State
) -> Kit:
    """`least_rows`: of a target pass; `width`: of every target pass, None if it may vary (see `Calibration`).

    Raises ValueError if the policy needs pass times that were not measured.
    """
    assert pair.drafter is not None and pair.vocabulary is not None
    policy = _policy(options, calibration, least_rows)
    if width is not None:
        policy.longest = min(policy.longest, width - 1)
    draft = pair.drafter
    translation = Translation(pair.vocabulary, options.mode, draft.decoder.vocabulary)
    file = _cache_file(pair, state) if options.mode.online else None
    cache = None if file is None else file.open(static=translation.merges)
    drafter = Drafter(
        draft.decoder,
        draft.tokens,
        pair.target.tokens,
        translation,
        cache,
        Outlook(pair.head),
        policy,
        context=draft.info.context,
        ends=pair.target.info.stop_ids,
        paper_rule=options.verification == "paper",
    )
    lookup = LookUp() if options.measured and options.lookup else None
    return Kit(Choice(drafter, lookup, policy), cache, file)


def _policy(options: Options, times: Calibration, least_rows: int) -> Policy:
    if options.gamma is not None:
        return Threshold(options.gamma)
    if options.fixed is not None:
        return Fixed(options.fixed)
    if times.target is None or times.drafter is None:
        raise ValueError("draft by cost needs pass times; calibrate with times")
    return CostAware(times.target, times.drafter, least_rows)


def _cache_file(pair: Pair, state: State) -> CacheFile:
    """That of the pair's tokenizers, which is all that n-grams depend on."""
    assert pair.drafter is not None
    draft, target = pair.drafter, pair.target
    hashes = {"draft_tokenizer": draft.info.tokenizer_sha256, "target_tokenizer": target.info.tokenizer_sha256}
    name = "-".join(digest[:12] for digest in hashes.values())
    path = f"pairs/{name}/ngram_cache.json"
    return CacheFile(state, path, {**hashes}, draft.tokens.bytes_of, target.tokens.bytes_of)
