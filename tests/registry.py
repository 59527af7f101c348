"""What the conformance suite tests: whatever is registered here must pass all of it (see test_conformance.py).

A new proposer, policy, verification, trainer, tokenizer family or decoder is one line in the table of its kind. All run
on small models with random weights, made here; the target's are nearly the drafter's, so that drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ASSISTANT, CORPUS, END, USER, random_model, small_tokenizer, write_tokenizer
from real_tokenizers import LLAMA3_PATTERN
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omnidraft.adapters.trainers import NAME
from omnidraft.export import cache, parity
from omnidraft.export.pipeline import Order, export
from omnidraft.export.sources import locate, resolve
from omnidraft.export.static_graph import write_static
from omnidraft.runtime.calibration import Calibration
from omnidraft.runtime.clock import PhaseClock
from omnidraft.runtime.drafting import Draft, Proposal
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.invariance import CHUNK
from omnidraft.runtime.lookup import LookUp
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.policy import Fixed
from omnidraft.runtime.proposer import Choice, Nothing, Proposer
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.static_decoder import StaticDecoder
from omnidraft.runtime.translation import Kind

GREEDY, WARM = Sampling(), Sampling(0.8, top_p=0.98, repetition_penalty=1.1, seed=11)
BOTH = (GREEDY, WARM)
LEARNED, NOISE = "byte-level BPE", 0.03
FOUR = Options("4")


@dataclass(frozen=True)
class Models:
    """A drafter with a target of each tokenizer family: the folders of their checkpoints, and the bundle."""

    checkpoints: Path
    bundle: Path


@dataclass(frozen=True)
class Case:
    """One registered thing among what is usual for all others. `samplings`: those that it is lossless with."""

    options: Options = FOUR
    proposer: Callable[[Engine], Proposer] | None = None
    trainer: str = ""
    family: str = LEARNED
    decoder: str = "cpu"
    samplings: Sequence[Sampling] = BOTH


# Proposers


class Knowing(Nothing):
    """The adversary: knows what the target will say, and proposes it, up to a wrong token and from there on nonsense.

    Wrong after 0, 1, 2, … right tokens in turn; every fifth time nothing is wrong, and it goes on behind the end.
    `truth`: the answer, which whoever asks sets before.
    """

    def __init__(self, engine: Engine) -> None:
        self._size = engine.pair.target.decoder.vocabulary
        self.truth: list[int] = []

    def begin(self, prompt: Sequence[int], prefix: Sequence[int], text: bytes, clock: PhaseClock) -> None:
        self._prompt, self._round = len(prompt), 0

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        self._round += 1
        tokens = (self.truth[position - self._prompt :] + [0] * limit)[:limit]
        wrong = self._round % 5
        if wrong < 4:
            tokens[wrong:] = [(token + 1) % self._size for token in tokens[wrong:]]
        return as_draft(tokens)


class Random(Nothing):
    """Proposes any ids at all, special ones too, as many as may be."""

    def __init__(self, engine: Engine) -> None:
        self._size, self._rng = engine.pair.target.decoder.vocabulary, np.random.default_rng(0)

    def propose(self, sampling: Sampling, position: int, limit: int) -> Draft:
        return as_draft(self._rng.integers(0, self._size, min(limit, 16)).tolist())


class Resting(Fixed):
    """Never asks the drafter, so that the look-up is alone."""

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        super().opens(past, limit, found)
        return False


def as_draft(tokens: Sequence[int]) -> Draft:
    return Draft([Proposal(token, Kind.DIRECT, (), 1.0) for token in tokens], drawn=len(tokens), translated=len(tokens))


def looking_up(engine: Engine) -> Proposer:
    assert isinstance(engine._proposer, Choice)
    return Choice(engine._proposer.drafter, LookUp(), Resting(8))


PROPOSERS: dict[str, Callable[[Engine], Proposer] | None] = {
    "drafter": None,
    "look-up": looking_up,
    "nothing": lambda engine: Nothing(),
    "random": Random,
    "adversary": Knowing,
}

# Policies, verifications, trainers

POLICIES = ("off", "1", "4", "16", "threshold", "threshold:0.1", "cost")
VERIFICATIONS = {"coupled": BOTH, "paper": (GREEDY,)}
TRAINERS = ("onnx-step", NAME)

# Tokenizer families


def _byte_fallback() -> Tokenizer:
    """SentencePiece BPE: pieces of text with ▁ for a space, and a token for each byte that no piece has."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = spaces
    trained.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [END, USER, ASSISTANT, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = spaces
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(content, special=True) for content in (END, USER, ASSISTANT, "<unk>")])
    return made


def _split_first() -> Tokenizer:
    """As Llama-3 and tiktoken have it: a pattern splits the text, and a word that is a token needs no merges."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END, USER, ASSISTANT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(CORPUS * 4, trainer)
    return made


def _digits() -> Tokenizer:
    """As SmolLM2 has it: every digit stands alone."""
    made = small_tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    LEARNED: small_tokenizer,
    "byte-level BPE, digits apart": _digits,
    "byte-level BPE, split first": _split_first,
    "SentencePiece BPE with byte fallback": _byte_fallback,
}

# Decoders


def _on_cpu(made: Models, family: str, scratch: Path) -> Pair:
    return load_pair(made.bundle, target_name(family), threads=1)


def _static(made: Models, family: str, scratch: Path) -> Pair:
    """The target as graphs of fixed shapes."""
    pair = _on_cpu(made, family, scratch)
    source = resolve(locate(str(made.checkpoints / target_name(family))))
    decoder = StaticDecoder(scratch, write_static(source, scratch, (1, 5, CHUNK), 256, False))
    info = replace(pair.target.info, context=decoder.context)
    return replace(pair, target=replace(pair.target, decoder=decoder, info=info))  # type: ignore[arg-type]


DECODERS: dict[str, Callable[[Models, str, Path], Pair]] = {"cpu": _on_cpu, "static graphs": _static}

CASES: dict[str, Case] = {
    **{f"proposer: {name}": Case(proposer=make) for name, make in PROPOSERS.items()},
    **{f"policy: {draft}": Case(Options(draft)) for draft in POLICIES},
    **{
        f"verification: {rule}": Case(Options("4", verification=rule), samplings=s) for rule, s in VERIFICATIONS.items()
    },
    **{f"trainer: {name}": Case(trainer=name) for name in TRAINERS},
    **{f"tokenizer: {name}": Case(Options("cost"), family=name) for name in FAMILIES},
    **{f"adversary, tokenizer: {name}": Case(proposer=Knowing, family=name) for name in FAMILIES},
    **{f"decoder: {name}": Case(decoder=name) for name in DECODERS},
    **{f"adversary, decoder: {name}": Case(proposer=Knowing, decoder=name) for name in DECODERS},
}


# What they run on


class _Quiet:
    def plan(self, steps: int) -> None: ...
    def step(self, what: str) -> None: ...
    def note(self, text: str) -> None: ...


def make_models(folder: Path) -> Models:
    """Checkpoints and bundle, int8: its one-row passes differ from wider ones, so the two-row rule is not idle."""
    made = Models(folder / "checkpoints", folder / "bundle")
    _write_checkpoint(made.checkpoints / "drafter", small_tokenizer(), 0.0, 0)
    for seed, (family, tokenizer) in enumerate(FAMILIES.items()):
        _write_checkpoint(made.checkpoints / target_name(family), tokenizer(), NOISE, seed)
    targets = {target_name(family): str(made.checkpoints / target_name(family)) for family in FAMILIES}
    anything = {name: parity.Threshold(0.0, np.inf) for name in parity.THRESHOLDS}  # random weights decide nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder / "cache")
        patch.setattr(parity, "THRESHOLDS", anything)
        export(Order(str(made.checkpoints / "drafter"), targets, made.bundle, ("int8",), "fp32"), _Quiet())
    return made


def engine_of(case: Case, pair: Pair, calibration: Calibration, state: State) -> Engine:
    engine = Engine(pair, case.options, state, calibration)
    if case.proposer is not None:
        engine._proposer = case.proposer(engine)
    return engine


def target_name(family: str) -> str:
    """What the bundle calls the target of a family."""
    return family.replace(",", "").replace(" ", "-")


def _write_checkpoint(folder: Path, tokenizer: Tokenizer, noise: float, seed: int) -> None:
    """The same random weights for all, as far as their sizes agree, and a little noise of their own."""
    import torch

    model: Any = random_model(vocab_size=tokenizer.get_vocab_size())
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=dice) * weight.std() * noise)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
