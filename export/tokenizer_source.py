"""What a checkpoint's tokenizer files say: the tokenizer itself, template, start and stop ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from omnidraft.export import cache
from omnidraft.export.libraries import first_line
from omnidraft.runtime import bundle
from omnidraft.runtime.errors import OmniDraftError

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|endoftext|>")
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OmniDraftError if it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OmniDraftError(f"{path}: missing; give the folder of a whole Hugging Face checkpoint") from None
    except ValueError as error:
        raise OmniDraftError(f"{path}: not JSON ({error}); download or copy it again") from None
    if not isinstance(value, dict):
        raise OmniDraftError(f"{path}: not a JSON object; download or copy it again")
    return value


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json, made from an older format (once, cached) where it is missing."""
    made = folder / "tokenizer.json"
    if made.is_file():
        return made
    old = [folder / name for name in SLOW_TOKENIZERS if (folder / name).is_file()]
    if not old:
        raise OmniDraftError(f"{folder}: no tokenizer.json or tokenizer.model; copy the tokenizer's files into it")
    said = [*folder.glob("*token*"), *old, *(folder / name for name in ("merges.txt", "config.json"))]
    parts = {path.name: bundle.sha256(path) for path in said if path.is_file()} | {"by": version("transformers")}

    def make(into: Path) -> None:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(into / "tokenizer.json"))
        except Exception as error:  # transformers raises many types for files it cannot convert
            raise OmniDraftError(f"{old[0]}: cannot be made into a tokenizer.json ({first_line(error)})") from None

    return cache.find_or_make("tokenizers", cache.key_of(**parts), make) / "tokenizer.json"


def chat_template(folder: Path) -> str | None:
    """The chat template (Jinja source), None if the checkpoint has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _settings(folder).get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template


def bos_id(folder: Path, tokenizer: Path) -> int | None:
    """The id that the tokenizer itself puts before a text, None if it puts none."""
    loaded, settings = _load(tokenizer), _settings(folder)
    if settings.get("add_bos_token") is False:
        return None
    plain, whole = loaded.encode("a", add_special_tokens=False).ids, loaded.encode("a").ids
    if len(whole) > len(plain) and whole[0] != plain[0]:
        return int(whole[0])
    if settings.get("add_bos_token"):
        return loaded.token_to_id(_content(settings.get("bos_token")))
    return None


def template_tokens(folder: Path, tokenizer: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a chat template may write by name: bos_token, eos_token, unk_token, pad_token."""
    loaded, settings = _load(tokenizer), _settings(folder)
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        number = config.get(f"{name}_id")
        number = number[0] if isinstance(number, list) else number
        content = _content(settings.get(name)) or (loaded.id_to_token(number) if isinstance(number, int) else None)
        if content:
            found[name] = content
    return found


def stop_ids(folder: Path, tokenizer: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: every eos that the checkpoint names, and the special tokens of TURN_ENDS.

    Ids beyond the model's vocabulary, which it cannot say, are left out.
    """
    loaded = _load(tokenizer)
    generation = folder / "generation_config.json"
    named = [config.get("eos_token_id"), read_json(generation).get("eos_token_id") if generation.is_file() else None]
    ids = {i for value in named for i in (value if isinstance(value, list) else [value]) if i is not None}
    eos = loaded.token_to_id(_content(_settings(folder).get("eos_token")))
    special = {token.content: i for i, token in loaded.get_added_tokens_decoder().items() if token.special}
    ids |= {special[text] for text in TURN_ENDS if text in special} | ({eos} if eos is not None else set())
    return tuple(sorted(i for i in ids if i < config["vocab_size"]))


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception
        raise OmniDraftError(f"{path}: not a tokenizer ({first_line(error)}); download or copy it again") from None


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _content(token: Any) -> str:
    """The text of a token that tokenizer_config.json writes as a string or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
