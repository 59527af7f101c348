"""A peer's process: onnxruntime-genai's own plain decoding of the bundle's graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import onnxruntime_genai

from omnidraft.tools.peers.talk import Answer, Facts, Generate, Request, serve


def open_model(graph: str, config: dict[str, Any], threads: int) -> tuple[Generate, Facts]:
    """`graph`: an .onnx file; `config`: the genai_config.json for it, to which the session's threads are added.

    Threads do not spin, as ours do not.
    """
    options = {"provider_options": [], "intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
    config["model"]["decoder"] |= {"session_options": options, "filename": Path(graph).name}
    with TemporaryDirectory(prefix="omnidraft-genai-") as folder:
        for path in Path(graph).parent.iterdir():
            (Path(folder) / path.name).symlink_to(path)
        (Path(folder) / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        model = onnxruntime_genai.Model(folder)

    def generate(request: Request) -> Answer:
        prompt = len(request.ids)
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=prompt + request.max_new_tokens, **_search(request.sampling))
        begin = perf_counter()
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(request.ids)
        generator.generate_next_token()
        first, passes = perf_counter(), 1
        while not generator.is_done():
            generator.generate_next_token()
            passes += 1
        end = perf_counter()
        tokens = generator.get_sequence(0).tolist()[prompt:]
        if len(tokens) < passes:  # its sequence ends before the stop id
            tokens += generator.get_next_tokens().tolist()
        return Answer(tokens, 1, first - begin, end - begin, passes)

    return generate, {"onnxruntime-genai": onnxruntime_genai.__version__}


def _search(sampling: Mapping[str, Any]) -> dict[str, Any]:
    common = {"repetition_penalty": sampling["repetition_penalty"]}
    if sampling["temperature"] == 0:
        return {**common, "do_sample": False}
    drawn = {name: sampling[name] for name in ("temperature", "top_k", "top_p")}
    return {**common, **drawn, "do_sample": True, "random_seed": sampling["seed"] % 2**31}


if __name__ == "__main__":
    serve(open_model)
