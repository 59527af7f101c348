"""The genai_config.json that onnxruntime-genai wants beside a target's graph."""

from __future__ import annotations

from typing import Any

from omnidraft.runtime.bundle import Target
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.pair import LoadedModel


def genai_config(target: LoadedModel[Target]) -> dict[str, Any]:
    """Without session options. Raises OmniDraftError for graphs that it does not run."""
    info, decoder = target.info, target.decoder
    if not isinstance(decoder, Decoder):
        raise OmniDraftError("onnxruntime-genai runs graphs of the cpu profile only; leave --profile and --ep out")
    kv_heads, head_size = next(iter(decoder.kv.values()))
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
                "head_size": head_size,
                "hidden_size": kv_heads * head_size,  # only the caches are made from these figures
                "num_attention_heads": kv_heads,
                "num_key_value_heads": kv_heads,
                "num_hidden_layers": len(decoder.kv) // 2,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
                "outputs": {"logits": "logits", **present},
            },
        },
        "search": {"do_sample": False, "past_present_share_buffer": True, "num_beams": 1, "max_length": info.context},
    }
