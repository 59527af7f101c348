"""A peer's process: llama.cpp's own server on a .gguf file, without HTTP between (through the wheel xllamacpp)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import xllamacpp

from omnidraft.tools.peers.talk import Answer, Facts, Generate, Request, serve

DETAILS = "__verbose"  # where its OpenAI-style answer keeps the token ids
ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # that of our sampling


def open_model(model: str, context: int, threads: int) -> tuple[Generate, Facts]:
    """`model`: the .gguf file; `context`: tokens that prompt and answer may have together."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def generate(request: Request) -> Answer:
        found = server.handle_completions(
            {
                "prompt": request.ids,
                "n_predict": request.max_new_tokens,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,
                "repeat_last_n": context,
                **_drawn(request.sampling),
            }
        )
        if "error" in found:
            raise RuntimeError(found["error"]["message"])
        tokens, times = found[DETAILS]["tokens"], found["timings"]
        first = times["prompt_ms"] / 1000
        return Answer(tokens, 1, first, first + times["predicted_ms"] / 1000, len(tokens))

    return generate, {"xllamacpp": version("xllamacpp"), "built for": xllamacpp.get_system_info().strip(" |")}


def _drawn(sampling: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {name: sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    penalty = {"repeat_penalty": sampling["repetition_penalty"]}
    return {**drawn, **penalty, "seed": sampling["seed"] % 2**32, "samplers": ORDER}


if __name__ == "__main__":
    serve(open_model)
