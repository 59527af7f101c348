"""onnxruntime-genai's own plain decoding of the same graph, as a row of the bench."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.report import Report, Tally, rate

NAME = "onnxruntime-genai"


class Genai:
    """Answers as an engine does, for `measure`. Greedy only: it draws with another noise.

    The model is loaded from the bundle's own files, with the engine's number of threads, and no spinning, as ours.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine`: of the same pair; it encodes the prompts. Raises OmniDraftError if the package cannot run it."""
        try:
            import onnxruntime_genai
        except ImportError:
            raise OmniDraftError(
                f"--against genai needs {NAME}; pip install -c constraints.txt onnxruntime-genai"
            ) from None
        self._genai, self._engine = onnxruntime_genai, engine
        pair = engine.pair
        graph = pair.bundle.path.resolve() / pair.bundle.graph(pair.name, pair.precision).model
        with TemporaryDirectory(prefix="omnidraft-genai-") as folder:
            for path in graph.parent.iterdir():
                (Path(folder) / path.name).symlink_to(path)
            (Path(folder) / "genai_config.json").write_text(json.dumps(_config(engine, graph.name)))
            try:
                self._model = onnxruntime_genai.Model(folder)
            except Exception as error:  # its library has one exception for all
                raise OmniDraftError(f"{graph}: {NAME} cannot load it ({str(error).splitlines()[0]})") from None

    def encode(self, prompt: Any, max_new_tokens: int, raw: bool = False) -> Any:
        """As the engine does."""
        return self._engine.encode(prompt, max_new_tokens, raw)

    def generate(self, prompt: Any, **arguments: Any) -> Report:
        """One greedy answer; the text is left out, the tokens are there."""
        if arguments["sampling"].temperature > 0 or arguments["stop"]:
            raise OmniDraftError("--against genai compares greedy decoding without --stop")
        most = arguments["max_new_tokens"]
        ids = self.encode(prompt, most, arguments["raw"])[0]
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=len(ids) + most, do_sample=False)
        begin = perf_counter()
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        end = perf_counter()
        tokens = generator.get_sequence(0).tolist()[len(ids) :]
        return _report(self._engine, tokens, len(ids), first - begin, end - begin)


def _config(engine: Engine, model: str) -> dict[str, Any]:
    info, decoder = engine.pair.target.info, engine.pair.target.decoder
    kv_heads, head_size = next(iter(decoder.kv.values()))
    layers = len(decoder.kv) // 2
    session = {
        "log_id": NAME,
        "provider_options": [],
        "intra_op_num_threads": engine.pair.threads,
        "session.intra_op.allow_spinning": "0",
    }
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    present = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    return {
        "model": {
            "type": "llama",
            "vocab_size": decoder.vocabulary,
            "context_length": info.context,
            "bos_token_id": info.bos if info.bos is not None else info.stop_ids[0],
            "eos_token_id": list(info.stop_ids),
            "pad_token_id": info.stop_ids[0],
            "decoder": {
                "session_options": session,
                "filename": model,
                "head_size": head_size,
                "hidden_size": kv_heads * head_size,  # only the caches are made from these figures
                "num_attention_heads": kv_heads,
                "num_key_value_heads": kv_heads,
                "num_hidden_layers": layers,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
                "outputs": {"logits": "logits", **present},
            },
        },
        "search": {"do_sample": False, "past_present_share_buffer": True, "num_beams": 1, "max_length": info.context},
    }


def _report(engine: Engine, tokens: list[int], prompt: int, first: float, seconds: float) -> Report:
    pair, tally = engine.pair, Tally(passes=len(tokens))
    return Report(
        text="", finish_reason="stop" if tokens[-1] in pair.target.info.stop_ids else "length", prompt_tokens=prompt,
        completion_tokens=len(tokens),
        tokens_per_second=rate(len(tokens) - 1, seconds - first) if len(tokens) > 1 else None,
        acceptance_rate=None, tokens_per_verify=None, mean_draft_length=None, ngram_use=None, ngram_acceptance=None,
        coverage=None, lookup_use=None, target=pair.name, precision=pair.precision, draft="off", lossless="near",
        verification="coupled", seed=0, context_used=0.0, time_to_first_token=first, seconds=seconds, overhead_ms=None,
        providers={"target": "CPUExecutionProvider"}, phases={"prefill": first, "verify": seconds - first},
        counts={**vars(tally), "emitted": len(tokens), "rounds": max(0, len(tokens) - 1)}, tokens=tokens,
    )  # fmt: skip
