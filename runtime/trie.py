"""The merges of a vocabulary map as a trie over draft tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Node:
    """What draft tokens spell so far. `target`: the target token they complete, -1 for none."""

    __slots__ = ("_merges", "children", "target")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.target = -1
        self._merges: tuple[np.ndarray, np.ndarray] | None = None

    def merges(self) -> tuple[np.ndarray, np.ndarray]:
        """(draft ids, target ids), int64 [n] each: the next draft tokens that complete a target token."""
        if self._merges is None:
            complete = [(draft, child.target) for draft, child in self.children.items() if child.target >= 0]
            pairs = np.array(complete, np.int64).reshape(-1, 2)
            self._merges = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        return self._merges

    def forget_merges(self) -> None:
        """Say that a child's target has changed."""
        self._merges = None


class MergeTrie:
    """Spellings in draft tokens -> the target token each spells; it may change between rounds."""

    def __init__(self, merges: Iterable[tuple[tuple[int, ...], int]] = ()) -> None:
        """`merges`: (spelling, target id); of two with one spelling the first counts."""
        self.root = Node()
        for spelling, target in merges:
            node = self.root
            for draft in spelling:
                child = node.children.get(draft)
                if child is None:
                    child = node.children[draft] = Node()
                node = child
            if node.target < 0:
                node.target = target

    def set(self, spelling: tuple[int, ...], target: int) -> None:
        """Let `spelling` (one draft token or more) stand for `target`, in place of what it stood for."""
        if not spelling or target < 0:
            raise ValueError("a merge needs draft tokens and a target id")
        parent = node = self.root
        for draft in spelling:
            parent, node = node, node.children.setdefault(draft, Node())
        node.target = target
        parent.forget_merges()

    def remove(self, spelling: tuple[int, ...]) -> None:
        """Let `spelling` stand for nothing; no effect if it did already."""
        path = [self.root]
        for draft in spelling:
            child = path[-1].children.get(draft)
            if child is None:
                return
            path.append(child)
        if len(path) == 1:
            return
        path[-1].target = -1
        path[-2].forget_merges()
        for i in range(len(spelling) - 1, -1, -1):
            if path[i + 1].target >= 0 or path[i + 1].children:
                return
            del path[i].children[spelling[i]]
