"""The parity gate: an exported graph against the checkpoint it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from omnidraft.export import cache
from omnidraft.export.libraries import first_line, quiet
from omnidraft.export.sources import Source
from omnidraft.runtime import bundle
from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.errors import OmniDraftError

POSITIONS, CHUNK, GREEDY, PROMPT_LIMIT = 256, 64, 24, 256
QUESTION = "What is the capital of France? Answer in one sentence."
TEXT = """The harbour town woke slowly. Fishing boats came back before dawn, and the smell of salt and diesel hung over
the market until noon. "Two kilos of mackerel," said Mrs. Okafor, "and don't give me the ones from yesterday!" The boy
laughed, wrapped the fish in paper and wrote down the price: 17.40. By 2031 the old pier would be gone.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: A train travels 240 km in 3 hours. How far does it travel in 5 hours?
Answer: Its speed is 240 / 3 = 80 km per hour, so in 5 hours it travels 80 * 5 = 400 km.

- Water boils at 100 °C at sea level; on a mountain of 3,000 m it boils near 90 °C.
- Der Zug fährt um halb acht ab. El tren sale a las siete y media. 電車は七時半に出発します。
- {"name": "sensor-7", "unit": "hPa", "values": [1013.2, 1009.8, 998.1], "ok": true}
"""


@dataclass(frozen=True)
class Threshold:
    """What a graph must reach: share of positions with the source's top-1, largest difference of a logit, and largest
    perplexity, in those of the source."""

    agreement: float
    difference: float = np.inf
    perplexity: float = np.inf


# fp32 differs from the source by rounding only (measured: 1e-4 and less). What quantization changes depends on the
# model, so those thresholds only tell a working graph (measured on the text above with a 135 M model: int8 0.97,
# int4 0.82; with a 5 M drafter 0.99 and 0.93) from a broken one (near 0).
THRESHOLDS = {
    "fp32": Threshold(0.995, 1e-2),
    "fp16": Threshold(0.95),
    "int8": Threshold(0.85),
    "int4": Threshold(0.45),
    **dict.fromkeys(("a16w8", "a8w8"), Threshold(0.6, perplexity=1.3)),
}


@dataclass(frozen=True)
class Reference:
    """What the source checkpoint says: ids [n], logits float32 [n, V]; a prompt, its greedy answer and, for each
    token of the answer, how far the second-best logit lies below the best."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    margins: NDArray[np.float32]


def reference(source: Source, threads: int) -> Reference:
    """The source checkpoint's own figures, computed with torch in float32 (once, cached)."""
    key = cache.key_of(
        weights=source.weights_sha256,
        config=source.config,
        tokenizer=bundle.sha256(source.tokenizer),
        template=source.chat_template,
        bos=source.bos,
        tokens=source.template_tokens,
        text=TEXT,
        question=QUESTION,
        sizes=[POSITIONS, GREEDY],
        transformers=version("transformers"),
    )

    def make(folder: Path) -> None:
        with quiet():
            found = _compute(source, threads)
        for name, array in vars(found).items():
            np.save(folder / f"{name}.npy", array)

    folder = cache.find_or_make("references", key, make)
    load = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in Reference.__dataclass_fields__}
    return Reference(**load)


def measure(decoder: CausalModel, expected: Reference, context: int) -> dict[str, Any]:
    """Compare a graph of so many positions with the source: figures for the manifest.

    The text is fed in chunks; a position with a logit that is no number does not agree. `greedy_margin` is how
    clear the source's choice was at the first token of the answer that differs (None if none does).
    """
    positions = min(len(expected.ids), context)
    answer_room = min(len(expected.answer), context - len(expected.prompt) - 1)
    decoder.reserve(max(len(expected.ids), len(expected.prompt) + len(expected.answer)) + 1)
    decoder.rollback(0)
    agree, difference, surprises = 0, 0.0, list[NDArray[np.float64]]()
    for begin, end in _chunks(positions):
        logits, wanted = decoder.run(expected.ids[begin:end]), expected.logits[begin:end]
        finite = np.isfinite(logits).all(axis=1) & np.isfinite(wanted).all(axis=1)
        agree += int(np.sum(finite & (logits.argmax(axis=1) == wanted.argmax(axis=1))))
        difference = max(difference, float(np.abs(logits - wanted)[finite].max(initial=0)))
        said = expected.ids[begin + 1 : end + 1]
        rows = np.flatnonzero(finite[: len(said)])
        surprises.append(np.stack([_surprise(some[rows], said[rows]) for some in (logits, wanted)]))
    answer = _greedy(decoder, expected.prompt, answer_room) if answer_room > 0 else []
    found = np.concatenate(surprises, axis=1)
    perplexity, source_perplexity = np.exp(found.sum(axis=1) / max(1, found.shape[1]))
    unequal = np.flatnonzero(np.asarray(answer, np.int64) != expected.answer[: len(answer)])
    return {
        "positions": positions,
        "top1_agreement": round(agree / positions, 4),
        "max_logit_difference": float(f"{difference:.3g}"),
        "perplexity": float(f"{perplexity:.4g}"),
        "source_perplexity": float(f"{source_perplexity:.4g}"),
        "greedy_tokens": len(answer),
        "greedy_equal": len(unequal) == 0,
        "greedy_margin": float(f"{expected.margins[unequal[0]]:.3g}") if len(unequal) else None,
    }


def require(figures: dict[str, Any], precision: str, what: str) -> None:
    """Raise OmniDraftError if a graph is below the thresholds of its precision.

    At fp32 the greedy text must be the source's too, up to a token where the source's own two best logits are
    closer than twice the tolerated difference.
    """
    limit, failed = THRESHOLDS[precision], ""
    if figures["top1_agreement"] < limit.agreement:
        failed = f"top-1 agreement {figures['top1_agreement']} is below {limit.agreement}"
    elif figures["max_logit_difference"] > limit.difference:
        failed = f"a logit differs by {figures['max_logit_difference']}, more than {limit.difference}"
    elif figures["perplexity"] > limit.perplexity * figures["source_perplexity"]:
        failed = f"perplexity {figures['perplexity']} is over {limit.perplexity} times {figures['source_perplexity']}"
    elif precision == "fp32" and not figures["greedy_equal"] and figures["greedy_margin"] > 2 * limit.difference:
        failed = "its greedy text is not the source's"
    if failed:
        raise OmniDraftError(f"{what} at {precision} does not match its source: {failed}; the bundle was not written")


def _surprise(logits: NDArray[np.float32], said: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log p(said) of each row of logits [n, V]."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1, keepdims=True, initial=-np.inf)
    totals: NDArray[np.float64] = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return totals - rows[np.arange(len(said)), said]


def _chunks(length: int) -> list[tuple[int, int]]:
    """Spans of CHUNK rows; the last takes a row from the one before rather than have one row (two-row rule)."""
    edges = [*range(0, length, CHUNK), length]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        edges[-2] -= 1
    return list(pairwise(edges))


def _greedy(decoder: CausalModel, prompt: Sequence[int] | NDArray[np.int64], count: int) -> list[int]:
    """The first `count` greedy tokens after a prompt, every pass with two rows or more."""
    decoder.rollback(0)
    for begin, end in _chunks(len(prompt)):
        rows = prompt[begin:end]
        logits = decoder.run(rows if len(rows) > 1 else [*rows, *rows])[len(rows) - 1]
        decoder.rollback(end)
    answer = [int(logits.argmax())]
    while len(answer) < count:
        logits = decoder.run([answer[-1], answer[-1]])[0]
        decoder.rollback(decoder.length - 1)
        answer.append(int(logits.argmax()))
    return answer


def _compute(source: Source, threads: int) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_file(str(source.tokenizer))
    before = [] if source.bos is None else [source.bos]
    ids = [*before, *tokenizer.encode(TEXT, add_special_tokens=False).ids][: min(POSITIONS, source.context)]
    text = QUESTION
    if source.chat_template is not None:
        chat = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        chat.chat_template = source.chat_template
        messages = [{"role": "user", "content": QUESTION}]
        text, before = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), []
    prompt = [*before, *tokenizer.encode(text, add_special_tokens=False).ids][: min(PROMPT_LIMIT, source.context)]
    count = min(GREEDY, source.context - len(prompt))
    try:
        model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:  # transformers raises many types for checkpoints it cannot load
        raise OmniDraftError(f"{source.folder}: transformers cannot load it ({first_line(error)})") from None
    answer: list[int] = []
    margins: list[float] = []
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        rows, past = torch.tensor([prompt]), None
        while len(answer) < count:
            step = model(rows, cache=past, use_cache=True)
            best = step.logits[0, -1].topk(2)
            answer.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            rows, past = best.indices[None, :1], step.cache
    return Reference(
        np.array(ids, np.int64),
        np.ascontiguousarray(logits, np.float32),
        np.array(prompt, np.int64),
        np.array(answer, np.int64),
        np.array(margins, np.float32),
    )
