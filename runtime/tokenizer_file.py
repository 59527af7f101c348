"""What a tokenizer.json says about bytes. The file is untrusted: every part that is read is checked first.

Two families are understood: byte-level BPE (every byte is one character of the GPT-2 alphabet) and SentencePiece BPE
with byte fallback ("▁" is a space, "<0xNN>" a byte).
"""

from __future__ import annotations

import re
from typing import Any

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.untrusted import MIB, parse_json

MAX_FILE_BYTES = 64 * MIB
MAX_TOKENS = 2_000_000
MAX_TOKEN_CHARS = 65_536
MAX_STEPS = 16  # of a pre-tokenizer; each goes over the whole text
SPACE = "▁"


def _byte_alphabet() -> list[str]:
    """Byte -> its character in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    return [table[byte] for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()
# Latin-1 characters outside the alphabet become one that Latin-1 cannot encode, so that they are noticed.
_FROM_ALPHABET = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(i) for i, char in enumerate(BYTE_ALPHABET)}


def parse(text: bytes, name: str) -> dict[str, Any]:
    """A tokenizer.json of a supported kind, with every part this module reads checked."""
    try:
        document = parse_json(text)
    except ValueError:
        raise OmniDraftError(f"{name}: not a tokenizer.json (no valid JSON); export or copy it again") from None
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise OmniDraftError(f"{name}: not a tokenizer.json (it has no model); export or copy it again")
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    kind = str(model.get("type", "BPE"))[:40]
    if affixes or not (is_byte_level(document) or model.get("byte_fallback") is True):
        kind += " without bytes"
    if kind != "BPE":
        raise OmniDraftError(
            f"{name}: tokenizers of kind {kind!r} are not supported; use a model with a byte-level BPE "
            "or a SentencePiece BPE with byte fallback"
        )
    steps = [step.get("type") for step in _steps(document.get("pre_tokenizer"), "pretokenizers")]
    if len(steps) > MAX_STEPS or steps.count("ByteLevel") > 1:  # a second one doubles the text, and so does a third
        raise OmniDraftError(f"{name}: its pre-tokenizer repeats itself ({len(steps)} steps); export or copy it again")
    vocabulary, added = model.get("vocab"), document.setdefault("added_tokens", [])
    if not isinstance(vocabulary, dict) or not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise OmniDraftError(f"{name}: its vocabulary or added_tokens are malformed; export or copy it again")
    if not isinstance(model.get("unk_token"), str | None):
        raise OmniDraftError(f"{name}: its unk_token is no text; export or copy it again")
    entries = [*vocabulary.items(), *((token["content"], token.get("id")) for token in added)]
    for content, token_id in entries:
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS or len(content) > MAX_TOKEN_CHARS:
            raise OmniDraftError(f"{name}: token {content[:40]!r} has the unusable id {str(token_id)[:40]}")
    try:
        "".join(content for content, _ in entries).encode()
    except UnicodeEncodeError:
        raise OmniDraftError(f"{name}: a token holds half a surrogate pair; export or copy it again") from None
    found: dict[str, Any] = document
    return found


def _is_added_token(token: Any) -> bool:
    if not isinstance(token, dict):
        return False
    return isinstance(token.get("content"), str) and isinstance(token.get("special"), bool)


def _steps(node: Any, children: str) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as a flat list of its steps."""
    steps, waiting = [], [node]
    while waiting:  # nothing bounds how deeply a stranger nests them
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        if node.get("type") == "Sequence" and isinstance(node.get(children), list):
            waiting += reversed(node[children])
        else:
            steps.append(node)
    return steps


def is_byte_level(document: dict[str, Any]) -> bool:
    """Whether vocabulary entries are written in the byte alphabet."""
    return any(step.get("type") == "ByteLevel" for step in _steps(document.get("pre_tokenizer"), "pretokenizers"))


def prefix_space(document: dict[str, Any]) -> str:
    """Where the tokenizer puts a space of its own: "never", "first" (a text's beginning), "missing" or "always".

    The last two are before every segment that special tokens leave of a text: "missing" only where
    the segment does not begin with a space, "always" in any case.
    """
    if any(step.get("type") == "Prepend" for step in _steps(document.get("normalizer"), "normalizers")):
        return "always"
    for step in _steps(document.get("pre_tokenizer"), "pretokenizers"):
        if step.get("prepend_scheme") == "first":
            return "first"
        if step.get("prepend_scheme") == "always" or step.get("add_prefix_space") is True:
            return "missing"
    return "never"


def continuation_settings(document: dict[str, Any]) -> dict[str, Any]:
    """An empty tokenizer with the document's settings, less all that changes text or adds a space before it."""
    keep = [
        step
        for step in _steps(document.get("normalizer"), "normalizers")
        if (step.get("type"), step.get("pattern"), step.get("content")) == ("Replace", {"String": " "}, SPACE)
        and not is_byte_level(document)
    ]
    before = []
    for step in _steps(document.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "ByteLevel":
            step = {**step, "add_prefix_space": False}
        elif step.get("type") == "Metaspace":
            step = {k: v for k, v in step.items() if k != "add_prefix_space"} | {"prepend_scheme": "never"}
        before.append(step)
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": keep} if keep else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before} if before else None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }


def read_bytes(document: dict[str, Any], byte_level: bool, name: str) -> tuple[int, list[bytes | None]]:
    """(size, bytes_of) of a parsed tokenizer.json. Raises OmniDraftError if two tokens share an id."""
    vocabulary: dict[str, int] = document["model"]["vocab"]
    added = {token["content"]: token for token in document["added_tokens"]}
    ids = vocabulary | {content: token["id"] for content, token in added.items()}
    if not ids or len(set(ids.values())) != len(ids):
        raise OmniDraftError(f"{name}: its vocabulary is empty or gives two tokens one id; export or copy it again")
    size = max(ids.values()) + 1
    bytes_of: list[bytes | None] = [None] * size
    nothing = {content for content, token in added.items() if token["special"]} | {document["model"].get("unk_token")}
    for content, token_id in ids.items():
        if content in nothing:
            continue
        if not byte_level:
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", content)
            piece = bytes.fromhex(byte[1]) if byte else content.replace(SPACE, " ").encode()
        elif content in added:
            piece = content.encode()
        else:
            try:
                piece = content.translate(_FROM_ALPHABET).encode("latin-1")
            except UnicodeEncodeError:
                continue
        bytes_of[token_id] = piece or None
    return size, bytes_of
