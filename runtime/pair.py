"""A target and its drafter, loaded and ready: what engines with different options share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from omnidraft.runtime import compiled
from omnidraft.runtime.acceptance import AcceptanceHead
from omnidraft.runtime.bundle import Bundle, Drafter, Graph, Target, open_bundle
from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placed import Placed
from omnidraft.runtime.placement import Refused, Wish, Wishes
from omnidraft.runtime.portable_decoder import PortableDecoder
from omnidraft.runtime.prompt import PromptEncoder
from omnidraft.runtime.state import State
from omnidraft.runtime.static_decoder import StaticDecoder
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap, load_map

MOST_THREADS = 4
ANYWHERE = Wishes()
Info = TypeVar("Info", Target, Drafter)


@dataclass(frozen=True)
class LoadedModel(Generic[Info]):
    """One model of the bundle in memory, by one of its graphs. `info.context` is the graph's, if that is less."""

    info: Info
    tokens: TokenBytes
    prompts: PromptEncoder
    decoder: CausalModel
    graph: Graph


@dataclass(frozen=True)
class Pair:
    """A target with its drafter; `drafter` and `vocabulary` are None where nothing will be drafted.

    `head`: predicts acceptance; None without a drafter, and for a drafter whose hidden states are not to be had.
    """

    bundle: Bundle
    name: str
    threads: int
    target: LoadedModel[Target]
    drafter: LoadedModel[Drafter] | None
    vocabulary: VocabularyMap | None
    head: AcceptanceHead | None = None

    @property
    def precision(self) -> str:
        """That of the target."""
        return self.target.graph.precision

    @property
    def graph_sha256(self) -> str:
        """What stands for the target's graph."""
        return self.bundle.digest(self.target.graph)

    @property
    def graphs(self) -> dict[str, Graph]:
        """What "target" and "drafter" were loaded from."""
        graphs = {"target": self.target.graph}
        return graphs if self.drafter is None else {**graphs, "drafter": self.drafter.graph}

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
    state: State | None = None,
) -> Pair:
    """Open a bundle and load one of its targets (default: the first, at its first precision).

    `threads` 0: as many as the machine has, up to 4; the drafter always runs on one. The hashes of
    all files used are checked, and remembered in `state`. `wishes`: where they shall run, and on which graphs;
    `Pair.placement` says where they do.
    Raises OmniDraftError for what is missing, damaged or unknown.
    """
    bundle = open_bundle(path, state)
    name, info = bundle.target(target)
    threads = threads or default_threads()
    loaded = _load(bundle, info, info.graphs, partial(bundle.graph, name), precision, threads, wishes.target)
    drafter = vocabulary = head = None
    if drafting:
        bundle.verify([info.map, *(bundle.drafter.head or {}).values()])
        graphs, choose = bundle.drafter.graphs, lambda _, profiles: bundle.drafter_graph(profiles)
        drafter = _load(bundle, bundle.drafter, graphs, choose, None, 1, wishes.drafter)
        vocabulary = load_map(path / info.map, bundle.drafter.tokenizer_sha256, info.tokenizer_sha256)
        if len(vocabulary.pieces) > drafter.decoder.vocabulary or len(vocabulary.spelling) > loaded.decoder.vocabulary:
            raise OmniDraftError(f"{path / info.map}: has more tokens than the models; export the bundle again")
        head = None if bundle.drafter.head is None else AcceptanceHead(path / bundle.drafter.head["graph"])
    return Pair(bundle, name, threads, loaded, drafter, vocabulary, head)


def _load(
    bundle: Bundle,
    info: Info,
    graphs: Sequence[Graph],
    choose: Callable[[str | None, Sequence[str]], Graph],
    precision: str | None,
    threads: int,
    wish: Wish,
) -> LoadedModel[Info]:
    """By the graph that a wish is for; where that is a compiled one and cannot be had, the CPU's own takes over."""
    if not compiled.wanted(graphs, wish):
        return _open(bundle, info, choose(precision, wish.profiles), threads, wish)
    on_qnn, on_cpu = replace(wish, ep="qnn", strict=True), Wish("cpu")
    try:
        graph = choose(precision, [compiled.fitting(bundle, graphs, on_qnn)])
        loaded, why, instead = _open(bundle, info, graph, threads, on_qnn), "", ""
    except OmniDraftError as error:
        if wish.strict:
            raise
        known = any(graph.precision == precision for graph in graphs if graph.profile in on_cpu.profiles)
        loaded = _open(bundle, info, choose(precision if known else None, on_cpu.profiles), threads, on_cpu)
        why = f"on the CPU because {error.reason if isinstance(error, Refused) else error}"
        instead = loaded.graph.label
    loaded.decoder.placed = replace(loaded.decoder.placed, requested=wish.ep, why=why, instead=instead)
    return loaded


def _open(bundle: Bundle, info: Info, graph: Graph, threads: int, wish: Wish) -> LoadedModel[Info]:
    bundle.verify([*bundle.folder_files(graph.model), info.tokenizer])
    tokens = TokenBytes.from_file(bundle.path / info.tokenizer)
    decoder: CausalModel
    if graph.profile == "portable":
        decoder = PortableDecoder(bundle.path / graph.model, threads, wish)
    elif graph.static is None:
        decoder = Decoder(bundle.path / graph.model, threads, wish)
    else:
        decoder = StaticDecoder(bundle.path / graph.folder, graph.static, threads, wish)
        info = replace(info, context=min(info.context, decoder.context))
    tokens.fit(decoder.vocabulary)
    return LoadedModel(info, tokens, PromptEncoder(bundle, info, tokens), decoder, graph)


def default_threads() -> int:
    """Threads of a target where nobody says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)
