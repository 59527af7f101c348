"""A .gguf file as a Hugging Face folder with float32 weights."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from omnidraft.export.libraries import first_line, quiet
from omnidraft.runtime.errors import OmniDraftError

PROCEDURE = "transformers dequantization/3"
LICENSE, ADD_BOS, PRE = "general.license", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre"
# transformers ignores what PRE says about digits; llama.cpp splits them one by one for these names.
SINGLE_DIGITS = ("smollm", "exaone", "minerva-7b", "starcoder", "refact", "command-r", "codeshell")


def count_parameters(path: Path) -> int:
    """Number of weights in the file."""
    return sum(prod(int(size) for size in tensor.shape) for tensor in _open(path).tensors)


def convert(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json, chat template and a card with the licence.

    Raises OmniDraftError if transformers cannot read the file's architecture.
    """
    metadata = _metadata(path)
    with quiet():
        _convert(path, folder, metadata)
    license_name = metadata.get(LICENSE) or "unknown"
    (folder / "README.md").write_text(f"---\nlicense: {license_name}\n---\n", encoding="utf-8")


def _convert(path: Path, folder: Path, metadata: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except Exception as error:  # transformers raises many types for what it does not support
        raise OmniDraftError(
            f"{path}: transformers cannot read it ({first_line(error)}); use the original checkpoint"
        ) from None
    # The loaded configuration keeps a mark "quantized with gguf" that forbids saving; the weights are float32.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    config = type(loaded.config).from_dict(settings)
    with torch.device("meta"):
        clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = loaded.generation_config
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _mend_tokenizer(folder / "tokenizer.json", config.vocab_size, metadata.get(PRE) in SINGLE_DIGITS)
    if ADD_BOS in metadata:
        file = folder / "tokenizer_config.json"
        described = {**json.loads(file.read_text(encoding="utf-8")), "add_bos_token": bool(metadata[ADD_BOS])}
        file.write_text(json.dumps(described, indent=1), encoding="utf-8")


def _mend_tokenizer(tokenizer: Path, vocabulary: int, single_digits: bool) -> None:
    """Remove special tokens that transformers adds by habit, beyond the model's rows; split digits if asked."""
    described = json.loads(tokenizer.read_text(encoding="utf-8"))
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < vocabulary]
    if single_digits:
        before = {"type": "Digits", "individual_digits": True}
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [before, described["pre_tokenizer"]]}
    tokenizer.write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")


def _metadata(path: Path) -> dict[str, Any]:
    fields = _open(path).fields
    return {name: fields[name].contents() for name in (LICENSE, ADD_BOS, PRE) if name in fields}


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # a damaged file surfaces as ValueError, IndexError, KeyError and others
        raise OmniDraftError(
            f"{path}: not a readable .gguf file ({first_line(error)}); download or copy it again"
        ) from None
