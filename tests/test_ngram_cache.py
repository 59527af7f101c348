"""The n-gram cache counts, evicts, switches off, and merges what several processes learned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from omnidraft.runtime.cache_file import CacheFile
from omnidraft.runtime.ngram_cache import (
    COLUMNS,
    MAX_SPELLING,
    MIN_TRIES,
    OFF_BELOW,
    RETRY_SEEN,
    NgramCache,
    Spelling,
    validated,
    wilson_upper,
)
from omnidraft.runtime.state import State

THE, SPLIT_THE = 7, (1, 2)
PAIRS = [(target, (1, last)) for target in range(3) for last in range(3)]  # three targets to each of three spellings


def lose(cache: NgramCache, times: int, target: int = THE, spelling: Spelling = SPLIT_THE) -> None:
    for _ in range(times):
        cache.record(target, spelling, accepted=False)


def totals(payload: dict[str, Any] | None) -> dict[tuple[int, Spelling], tuple[int, int, int]]:
    return {(row[0], tuple(row[1])): tuple(row[2:5]) for row in payload["entries"]} if payload else {}


def test_an_instance_in_verified_text_becomes_a_merge() -> None:
    cache = NgramCache()
    cache.observe(THE, SPLIT_THE)
    assert cache.take_changes() == [(SPLIT_THE, THE)]
    cache.observe(THE, SPLIT_THE)
    cache.record(THE, SPLIT_THE, accepted=True)
    assert cache.take_changes() == []
    entry = cache.entries[SPLIT_THE]
    assert (entry.target, entry.seen, entry.proposed, entry.accepted, entry.off) == (THE, 2, 1, 1, False)


def test_of_two_targets_with_one_spelling_the_more_often_seen_is_used() -> None:
    cache = NgramCache()
    cache.observe(7, SPLIT_THE)
    cache.observe(8, SPLIT_THE)
    assert cache.take_changes() == [(SPLIT_THE, 7)]
    cache.observe(8, SPLIT_THE)
    assert cache.take_changes() == [(SPLIT_THE, 8)]
    assert cache.entries[SPLIT_THE].target == 8
    lose(cache, MIN_TRIES, target=8)
    assert cache.take_changes() == [(SPLIT_THE, 7)]


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_wilsons(tries: tuple[int, int]) -> None:
    expected = binomtest(*tries).proportion_ci(0.95, method="wilson").high
    assert wilson_upper(*tries) == pytest.approx(expected, abs=1e-6)


def test_a_merge_that_loses_is_switched_off_only_after_enough_tries() -> None:
    cache = NgramCache(static={SPLIT_THE: THE})
    lose(cache, MIN_TRIES - 1)
    assert cache.take_changes() == []  # the trie has it from the static map
    lose(cache, 1)
    assert cache.take_changes() == [(SPLIT_THE, None)]
    assert cache.entries[SPLIT_THE].off


@pytest.mark.parametrize("accepted", [1, 2, 3, 5, 10])
def test_a_merge_is_off_only_when_its_interval_lies_below_the_bar(accepted: int) -> None:
    cache = NgramCache()
    for _ in range(accepted):
        cache.record(THE, SPLIT_THE, accepted=True)
    while not cache.entries[SPLIT_THE].off:
        lose(cache, 1)
    tries = cache.entries[SPLIT_THE].proposed
    assert tries > MIN_TRIES and wilson_upper(accepted, tries) < OFF_BELOW <= wilson_upper(accepted, tries - 1)


def test_it_is_tried_again_when_verified_text_has_it_often_and_half_the_old_tries_still_count() -> None:
    cache = NgramCache(static={SPLIT_THE: THE})
    lose(cache, MIN_TRIES)
    cache.take_changes()
    for _ in range(RETRY_SEEN - 1):
        cache.observe(THE, SPLIT_THE)
    assert cache.take_changes() == []
    cache.observe(THE, SPLIT_THE)
    assert cache.take_changes() == [(SPLIT_THE, THE)]
    lose(cache, MIN_TRIES // 2 - 1)
    assert cache.take_changes() == []
    lose(cache, 1)
    assert cache.take_changes() == [(SPLIT_THE, None)]


def test_a_static_merge_that_is_evicted_is_what_the_static_map_says() -> None:
    cache = NgramCache(capacity=1, static={SPLIT_THE: THE})
    lose(cache, MIN_TRIES)
    assert cache.take_changes() == [(SPLIT_THE, None)]
    cache.observe(9, (3, 4))
    assert dict(cache.take_changes()) == {SPLIT_THE: THE, (3, 4): 9}
    cache.observe(9, (3, 5))
    assert dict(cache.take_changes()) == {(3, 4): None, (3, 5): 9}


def test_long_spellings_are_not_kept_and_single_tokens_are_no_merges() -> None:
    cache = NgramCache()
    cache.observe(THE, tuple(range(MAX_SPELLING + 1)))
    assert len(cache) == 0
    with pytest.raises(ValueError):
        cache.observe(THE, (1,))


operations = st.lists(st.tuples(st.sampled_from(PAIRS), st.sampled_from(["seen", "hit", "miss"])), max_size=120)


def apply(cache: NgramCache, pair: tuple[int, Spelling], what: str) -> None:
    if what == "seen":
        cache.observe(*pair)
    else:
        cache.record(*pair, accepted=what == "hit")


@given(operations, st.integers(1, 10))
def test_eviction_takes_the_least_frequent_then_the_least_recent(
    operations: list[tuple[tuple[int, Spelling], str]], capacity: int
) -> None:
    cache, model = NgramCache(capacity), dict[tuple[int, Spelling], tuple[int, int]]()
    for time, (pair, what) in enumerate(operations):
        apply(cache, pair, what)
        if pair not in model and len(model) == capacity:
            del model[min(model, key=lambda p: model[p])]
        model[pair] = model.get(pair, (0, 0))[0] + (what != "miss"), time
        assert totals(cache.to_payload()).keys() == model.keys()
        assert {p: c[0] + c[2] for p, c in totals(cache.to_payload()).items()} == {p: f for p, (f, _) in model.items()}


@given(operations, st.integers(1, 10), st.dictionaries(st.sampled_from([s for _, s in PAIRS]), st.integers(0, 2)))
def test_a_trie_that_follows_the_changes_always_has_what_is_in_use(
    operations: list[tuple[tuple[int, Spelling], str]], capacity: int, static: dict[Spelling, int]
) -> None:
    cache, trie = NgramCache(capacity, static), dict(static)
    for pair, what in operations:
        for _ in range(1 if what != "miss" else 7):  # so that some are switched off
            apply(cache, pair, what)
        if what == "hit":
            cache.adopt(NgramCache((capacity + 1) // 2).merged(cache.to_payload()))
        for spelling, target in cache.take_changes():
            if target is None:
                del trie[spelling]  # a second removal would be an error
            else:
                assert trie.get(spelling) != target
                trie[spelling] = target
        expected = {s: t for s, t in static.items() if s not in cache.entries}
        for spelling, entry in cache.entries.items():
            off = {e.target for e in cache._spelled[spelling]}
            if not entry.off:
                expected[spelling] = entry.target
            elif spelling in static and static[spelling] not in off:
                expected[spelling] = static[spelling]
        assert trie == expected


sessions = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(
            st.tuples(st.sampled_from(PAIRS), st.sampled_from(["seen", "hit", "miss"])),
            st.sampled_from(["save", "save fails", "restart"]),
        ),
    ),
    max_size=150,
)


@given(sessions)
def test_two_processes_that_share_a_file_add_up(sessions: list[tuple[int, Any]]) -> None:
    """Any interleaving of counting, saving, failing to save and restarting gives the sum of what was counted."""
    file: dict[str, Any] | None = None
    caches = [NgramCache(), NgramCache()]
    counted: list[Counter[Any]] = [Counter(), Counter()]  # not yet saved, by process
    saved: Counter[Any] = Counter()

    def save(who: int) -> None:
        nonlocal file
        file = caches[who].merged(file)
        caches[who].adopt(file)
        saved.update(counted[who])
        counted[who].clear()
        assert not caches[who].unsaved

    for who, action in sessions:
        if action == "save":
            save(who)
        elif action == "save fails":
            caches[who].merged(file)
        elif action == "restart":
            caches[who] = NgramCache.from_payload(file)
            counted[who].clear()  # a crash: what was not saved is gone
        else:
            times = 7 if action[1] == "miss" else 1  # so that some are switched off
            for _ in range(times):
                apply(caches[who], *action)
            counted[who][action] += times
    save(0), save(1)
    assert totals(file) == {
        pair: (saved[pair, "seen"], saved[pair, "hit"] + saved[pair, "miss"], saved[pair, "hit"])
        for pair in {pair for pair, _ in saved}
    }
    table: list[bytes | None] = [b""] * 3
    assert file is not None and validated(file, table, table) == (file, 0)


def test_both_processes_know_afterwards_what_is_off() -> None:
    file = NgramCache().merged(None)
    first, second = NgramCache.from_payload(file), NgramCache.from_payload(file)
    lose(first, MIN_TRIES)
    second.observe(THE, SPLIT_THE)
    assert second.take_changes() == [(SPLIT_THE, THE)]
    file = first.merged(file)
    file = second.merged(file)
    second.adopt(file)
    assert second.take_changes() == [(SPLIT_THE, None)]


def test_what_was_forgotten_stays_forgotten_by_a_running_process() -> None:
    cache = NgramCache()
    lose(cache, 2 * MIN_TRIES)
    cache.observe(8, (5, 6))
    cache.adopt(cache.merged(None))
    for _ in range(RETRY_SEEN):
        cache.observe(THE, SPLIT_THE)
    file = cache.merged(None)  # the file was removed meanwhile
    assert totals(file) == {(THE, SPLIT_THE): (RETRY_SEEN, 0, 0)}
    assert validated(file, [b"x"] * 9, [b"xx"] * 9) == (file, 0)


def test_the_file_is_bounded_and_keeps_the_most_frequent() -> None:
    cache = NgramCache(capacity=3)
    for n in range(3):
        for _ in range(n + 1):
            cache.observe(n, (n, n))
    other = NgramCache(capacity=3)
    for n in range(3, 6):
        for _ in range(n - 1):
            other.observe(n, (n, n))
    merged = other.merged(cache.to_payload())
    assert totals(merged) == {(n, (n, n)): (n - 1 if n > 2 else n + 1, 0, 0) for n in (2, 4, 5)}
    assert len(NgramCache.from_payload(merged, capacity=2)) == 2


DRAFT: list[bytes | None] = [b"t", b"he", None, b"", b"x"]
TARGET: list[bytes | None] = [b"the", None, b"th", b"t", b""]


@pytest.mark.parametrize(
    "row",
    [
        [2, [0, 1], 1, 0, 0, 0, 0, None],  # other bytes
        [0, [1, 0], 1, 0, 0, 0, 0, None],  # wrong order
        [9, [0, 1], 1, 0, 0, 0, 0, None],  # no such target
        [0, [0, 9], 1, 0, 0, 0, 0, None],  # no such draft token
        [1, [0, 1], 1, 0, 0, 0, 0, None],  # a special token
        [0, [0, 2], 1, 0, 0, 0, 0, None],
        [1, [2, 2], 1, 0, 0, 0, 0, None],  # None is not equal to None
        [0, [0, -4], 1, 0, 0, 0, 0, None],
        [-5, [0, 1], 1, 0, 0, 0, 0, None],
        [0, [0, 1], 1, 1, 2, 0, 0, None],  # more accepted than proposed
        [0, [0, 1], 1, 2, 1, 2, 0, None],  # more forgotten than there was
        [0, [0, 1], 1, 2, 1, 0, 2, None],
    ],
)
def test_entries_that_cannot_be_true_are_dropped(row: list[Any]) -> None:
    good = [0, [0, 1], 3, 2, 1, 1, 1, 4]
    payload = {"columns": COLUMNS, "entries": [row, good, good]}
    kept, dropped = validated(payload, DRAFT, TARGET)
    assert kept["entries"] == [good] and dropped == 2


@given(operations, st.integers(1, 10))
def test_a_payload_is_json_and_comes_back_the_same(
    operations: list[tuple[tuple[int, Spelling], str]], capacity: int
) -> None:
    cache = NgramCache(capacity)
    for pair, what in operations:
        apply(cache, pair, what)
    payload = json.loads(json.dumps(cache.to_payload()))
    assert payload == cache.to_payload()
    assert NgramCache.from_payload(payload, capacity).to_payload() == payload


def cache_file(folder: Path, lines: list[str], **key: str) -> CacheFile:
    key = {"draft_tokenizer": "a", "target_tokenizer": "b", **key}
    return CacheFile(State(folder, lines.append), "ngram_cache.json", dict(key), DRAFT, TARGET)


def test_a_cache_file_is_learned_by_two_engines(tmp_path: Path) -> None:
    lines: list[str] = []
    files = [cache_file(tmp_path / "state", lines) for _ in range(2)]
    caches = [file.open() for file in files]
    for file, cache in zip(files, caches, strict=True):
        cache.observe(0, (0, 1))
        file.save(cache)
    assert caches[1].entries[0, 1].seen == 2 and caches[1].take_changes() == [((0, 1), 0)]
    files[0].save(caches[0])  # nothing new: not even read
    assert caches[0].entries[0, 1].seen == 1
    assert files[0].open().entries[0, 1].seen == 2 and lines == []


def test_a_cache_of_other_tokenizers_or_with_false_entries_is_not_used(tmp_path: Path) -> None:
    lines: list[str] = []
    file = cache_file(tmp_path / "state", lines)
    poisoned = file.open()
    poisoned.observe(0, (0, 1))
    poisoned.observe(2, (0, 1))
    poisoned.observe(2, (4, 4))
    file.save(poisoned)
    assert list(file.open().entries) == [(0, 1)]
    assert len(lines) == 1 and "2 entries" in lines[0]
    assert len(cache_file(tmp_path / "state", lines, target_tokenizer="c").open()) == 0
    assert len(lines) == 2 and "target_tokenizer differs" in lines[1]
