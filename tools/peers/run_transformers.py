"""A peer's process: Hugging Face transformers, plain or with universal assisted decoding, in float32 on the CPU."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from omnidraft.tools.peers.talk import Answer, Facts, Generate, Request, serve


class Deliveries(BaseStreamer):
    """When tokens were delivered, and how many at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt comes first."""
        self.seen.append((perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing to flush."""


class Passes:
    """The target's forward passes: when each began and ended, and how many rows it had."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[float, float, int]] = []
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, model: Any, arguments: Any) -> None:
        self._begin = perf_counter()

    def _after(self, model: Any, arguments: Any, keywords: dict[str, Any], result: Any) -> None:
        self.seen.append((self._begin, perf_counter(), keywords["input_ids"].shape[1]))


def open_model(target: str, drafter: str | None, stop_ids: list[int], threads: int) -> tuple[Generate, Facts]:
    """`target` and `drafter` are folders of checkpoints; without a drafter, plain decoding."""
    torch.set_num_threads(threads)
    model = _load(target)
    assisted: dict[str, Any] = {}
    if drafter is not None:
        tokenizers = {"tokenizer": target, "assistant_tokenizer": drafter}
        assisted = {name: AutoTokenizer.from_pretrained(folder) for name, folder in tokenizers.items()}
        assisted["assistant_model"] = _load(drafter)
    passes = Passes(model)

    def generate(request: Request) -> Answer:
        config = _config(request, stop_ids)
        ids = torch.tensor([request.ids])
        torch.manual_seed(request.sampling["seed"])
        deliveries = Deliveries()
        passes.seen.clear()
        begin = perf_counter()
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=deliveries, **assisted
            )
        end = perf_counter()
        return _answer(whole[0, ids.shape[1] :].tolist(), len(request.ids), begin, end, deliveries, passes)

    return generate, {"transformers": transformers.__version__, "torch": torch.__version__}


def _load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _config(request: Request, stop_ids: list[int]) -> GenerationConfig:
    s = request.sampling
    drawn = {}
    if s["temperature"] > 0:
        names = ("temperature", "top_k", "top_p")
        drawn = {name: s[name] for name in names} | {"min_p": s["min_p"] or None}
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens, eos_token_id=stop_ids, pad_token_id=stop_ids[0],
        do_sample=bool(drawn), repetition_penalty=s["repetition_penalty"], **drawn,
    )  # fmt: skip


def _answer(tokens: list[int], prompt: int, begin: float, end: float, deliveries: Deliveries, passes: Passes) -> Answer:
    """The first pass reads the prompt, and verifies what was proposed for the first tokens."""
    _, (first_at, first), *_ = deliveries.seen
    rows = [rows for _, _, rows in passes.seen]
    proposed = sum(rows) - prompt - (len(rows) - 1)
    later = sum(after - before for before, after, _ in passes.seen[1:])
    return Answer(
        tokens, first, first_at - begin, end - begin, len(rows), proposed,
        accepted=len(tokens) - len(rows), drafting=max(0.0, end - first_at - later) if proposed else 0.0,
    )  # fmt: skip


if __name__ == "__main__":
    serve(open_model)
