"""A target and its drafter, loaded and ready: what engines with different options share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from omnidraft.runtime.acceptance import AcceptanceHead
from omnidraft.runtime.bundle import Bundle, Drafter, Target, open_bundle
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.placement import Placed, Wish, Wishes
from omnidraft.runtime.prompt import PromptEncoder
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap, load_map

MOST_THREADS = 4
ANYWHERE = Wishes()
Info = TypeVar("Info", Target, Drafter)


@dataclass(frozen=True)
class LoadedModel(Generic[Info]):
    """One model of the bundle in memory."""

    info: Info
    tokens: TokenBytes
    prompts: PromptEncoder
    decoder: Decoder


@dataclass(frozen=True)
class Pair:
    """A target with its drafter; `drafter` and `vocabulary` are None where nothing will be drafted.

    `head`: predicts acceptance; None without a drafter, and for a drafter whose hidden states are not to be had.
    """

    bundle: Bundle
    name: str
    precision: str
    graph_sha256: str
    threads: int
    target: LoadedModel[Target]
    drafter: LoadedModel[Drafter] | None
    vocabulary: VocabularyMap | None
    head: AcceptanceHead | None = None

    @property
    def placement(self) -> dict[str, Placed]:
        """Where "target" and "drafter" run."""
        placed = {"target": self.target.decoder.placed}
        return placed if self.drafter is None else {**placed, "drafter": self.drafter.decoder.placed}


def load_pair(
    path: Path,
    target: str | None = None,
    precision: str | None = None,
    threads: int = 0,
    drafting: bool = True,
    wishes: Wishes = ANYWHERE,
) -> Pair:
    """Open a bundle and load one of its targets (default: the first, at its first precision).

    `threads` 0: as many as the machine has, up to 4; the drafter always runs on one. The hashes of
    all files used are checked. `wishes`: where they shall run; `Pair.placement` says where they do.
    Raises OmniDraftError for what is missing, damaged or unknown.
    """
    bundle = open_bundle(path)
    name, info = bundle.target(target)
    graph = bundle.graph(name, precision)
    threads = threads or default_threads()
    bundle.verify([*bundle.folder_files(graph.model), info.tokenizer])
    loaded = _load(bundle, info, graph.model, threads, wishes.target)
    drafter = vocabulary = head = None
    if drafting:
        bundle.verify([*bundle.folder_files(bundle.drafter.model), info.map])
        drafter = _load(bundle, bundle.drafter, bundle.drafter.model, 1, wishes.drafter)
        vocabulary = load_map(path / info.map, bundle.drafter.tokenizer_sha256, info.tokenizer_sha256)
        head = None if bundle.drafter.head is None else AcceptanceHead(path / bundle.drafter.head["graph"])
    digest = bundle.files[graph.model]["sha256"]
    return Pair(bundle, name, graph.precision, digest, threads, loaded, drafter, vocabulary, head)


def _load(bundle: Bundle, info: Info, model: str, threads: int, wish: Wish) -> LoadedModel[Info]:
    tokens = TokenBytes.from_file(bundle.path / info.tokenizer)
    decoder = Decoder(bundle.path / model, threads, wish)
    tokens.fit(decoder.vocabulary)
    return LoadedModel(info, tokens, PromptEncoder(bundle, info, tokens), decoder)


def default_threads() -> int:
    """Threads of a target where nobody says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)
