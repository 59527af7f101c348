"""Where a checkpoint comes from, and what an export needs to know about it."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from omnidraft.export import cache, gguf_source, tokenizer_source
from omnidraft.export.libraries import first_line
from omnidraft.export.tokenizer_source import read_json
from omnidraft.models import registry
from omnidraft.runtime import bundle
from omnidraft.runtime.errors import OmniDraftError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "README.md"]
LICENSE = re.compile(r"\A---\s.*?^license:\s*[\"']?([\w.+-]+)[\"']?\s*$.*?^---", re.DOTALL | re.MULTILINE)
HEADER_LIMIT = 100 << 20
CONVERSIONS = "conversions"


@dataclass(frozen=True)
class Located:
    """A checkpoint that was found on this machine but not read yet: a Hugging Face folder or a .gguf file.

    `conversion` is the cache key of the folder that a .gguf file is converted to, `digest` the file's SHA-256.
    """

    name: str
    kind: str
    path: Path
    digest: str = ""
    conversion: str = ""


@dataclass(frozen=True)
class Source:
    """A checkpoint as a Hugging Face folder with safetensors weights, and the facts of it that a bundle records."""

    name: str
    kind: str
    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    weights_sha256: str
    tokenizer: Path
    chat_template: str | None
    bos: int | None
    template_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    license: str

    @property
    def architecture(self) -> str:
        """The model class of Hugging Face that runs this checkpoint."""
        return str(self.config["architectures"][0])

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.config["vocab_size"])

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return int(self.config["max_position_embeddings"])


def locate(source: str) -> Located:
    """Find a checkpoint by known name, path, or id on the Hugging Face hub (which downloads it).

    Raises OmniDraftError if it is none of these.
    """
    if source in registry.names():
        try:
            path = registry.locate(source)
        except registry.NotInstalled as error:
            raise OmniDraftError(str(error)) from None
        return _gguf(source, path) if path.suffix == ".gguf" else Located(source, "huggingface", path)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _gguf(path.name, path)
    if path.is_file():
        raise OmniDraftError(f"{source}: not a .gguf file; give a Hugging Face folder, a hub id or a .gguf file")
    if path.is_dir():
        return Located(path.resolve().name, "huggingface", path)
    if HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return Located(source, "huggingface", _download(source))
    known = ", ".join(registry.names())
    raise OmniDraftError(f"{source}: no such folder or .gguf file, and not a known model ({known}) or hub id")


def count_parameters(located: Located) -> int:
    """Number of weights, read from the headers of the weight files alone."""
    folder: Path | None = located.path
    if located.kind == "gguf":
        folder = cache.find(CONVERSIONS, located.conversion)
    if folder is None:
        return gguf_source.count_parameters(located.path)
    return sum(_parameters(path) for path in _weights(folder))


def resolve(located: Located) -> Source:
    """Read a checkpoint's description; a .gguf file is converted first, once (cached).

    Raises OmniDraftError if something of it is missing or not supported.
    """
    folder = located.path
    if located.kind == "gguf":
        folder = cache.find_or_make(
            CONVERSIONS, located.conversion, lambda made: gguf_source.convert(located.path, made)
        )
    config = read_json(folder / "config.json")
    if config.get("model_type") == "llama":
        config.setdefault("architectures", ["LlamaForCausalLM"])
    for name in ("architectures", "vocab_size", "max_position_embeddings"):
        if not config.get(name):
            raise OmniDraftError(f"{folder / 'config.json'}: no {name}; it is not a causal language model's")
    if config.get("quantization_config"):
        raise OmniDraftError(f"{folder}: its weights are quantized already; export from the original weights")
    weights = _weights(folder)
    tokenizer = tokenizer_source.tokenizer_file(folder)
    return Source(
        name=located.name,
        kind=located.kind,
        folder=folder,
        config=config,
        weights=weights,
        weights_sha256=located.digest or _digest(weights),
        tokenizer=tokenizer,
        chat_template=tokenizer_source.chat_template(folder),
        bos=tokenizer_source.bos_id(folder, tokenizer),
        template_tokens=tokenizer_source.template_tokens(folder, tokenizer, config),
        stop_ids=tokenizer_source.stop_ids(folder, tokenizer, config),
        license=_license(folder),
    )


def _gguf(name: str, path: Path) -> Located:
    digest = bundle.sha256(path)
    return Located(name, "gguf", path, digest, cache.key_of(file=digest, procedure=gguf_source.PROCEDURE))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # offline, unknown or gated model: the hub's library has an exception for each
        raise OmniDraftError(
            f"{hub_id}: no such folder, and the Hugging Face hub did not give it ({first_line(error)})"
        ) from None


def _weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, in order."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        paths = tuple(folder / name for name in shards)
    else:
        paths = (folder / "model.safetensors",)
    for path in paths:
        if not path.is_file():
            raise OmniDraftError(f"{path}: missing; a source folder needs safetensors weights")
    return paths


def _parameters(path: Path) -> int:
    """Number of values in a safetensors file (8 bytes of header length, then a JSON header)."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT
        text = file.read(size) if size < HEADER_LIMIT else b""
    try:
        header = json.loads(text)
        return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise OmniDraftError(f"{path}: not a safetensors file; download or copy it again") from None


def _digest(paths: tuple[Path, ...]) -> str:
    """SHA-256 of one file, or of the digests of several in order."""
    digests = [bundle.sha256(path) for path in paths]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


def _license(folder: Path) -> str:
    """The licence in the front matter of a model card, or "unknown"."""
    card = folder / "README.md"
    found = LICENSE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found.group(1) if found else "unknown"
