"""The trie of merges is a dictionary of spellings, whatever is set and removed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.runtime.trie import MergeTrie, Node

SPELLING = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
EDITS = st.lists(st.tuples(SPELLING, st.none() | st.integers(0, 9)), max_size=40)


def spelled(node: Node, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: node.target} if node.target >= 0 else {}
    for draft, child in node.children.items():
        found |= spelled(child, (*path, draft))
    return found


def check_merges(node: Node) -> None:
    drafts, targets = node.merges()
    assert drafts.dtype == targets.dtype == np.int64
    expected = {d: child.target for d, child in node.children.items() if child.target >= 0}
    assert dict(zip(drafts.tolist(), targets.tolist(), strict=True)) == expected
    for child in node.children.values():
        assert child.target >= 0 or child.children, "a dead branch was left behind"
        check_merges(child)


@given(first=st.dictionaries(SPELLING, st.integers(0, 9)), edits=EDITS)
def test_equals_a_dictionary(
    first: dict[tuple[int, ...], int], edits: list[tuple[tuple[int, ...], int | None]]
) -> None:
    trie, model = MergeTrie(first.items()), dict(first)
    for spelling, target in edits:
        check_merges(trie.root)  # fills every cache, so that a stale one would show
        if target is None:
            trie.remove(spelling)
            model.pop(spelling, None)
        else:
            trie.set(spelling, target)
            model[spelling] = target
        assert spelled(trie.root) == model
    check_merges(trie.root)


def test_merges_are_kept_until_a_child_changes() -> None:
    trie = MergeTrie([((1, 2), 7), ((1, 3), 8)])
    node = trie.root.children[1]
    before = node.merges()
    assert node.merges() is before
    trie.set((2, 2), 9)
    assert node.merges() is before
    trie.set((1, 2), 9)
    assert dict(zip(*map(np.ndarray.tolist, node.merges()), strict=True)) == {2: 9, 3: 8}


def test_of_two_targets_with_one_spelling_the_first_counts() -> None:
    assert spelled(MergeTrie([((1, 2), 7), ((1, 2), 8)]).root) == {(1, 2): 7}


def test_an_empty_spelling_is_refused() -> None:
    with pytest.raises(ValueError, match="needs draft tokens"):
        MergeTrie().set((), 1)
    MergeTrie().remove(())
