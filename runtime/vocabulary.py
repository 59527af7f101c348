"""The static map between the vocabularies of a drafter and a target, computed at export, verified by bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.tokenizer_file import MAX_TOKENS
from omnidraft.runtime.untrusted import MIB, parse_json

SCHEMA = "omnidraft-vocabulary/1"
MAX_SPELLING = 512  # tokens one entry may have: a token of many spaces or emoji in another vocabulary's bytes
MAX_FILE_BYTES = 64 * MIB
_ENDS = ("eos", "end_of_turn")


@dataclass(frozen=True)
class VocabularyMap:
    """Draft ids in target ids and back.

    pieces: draft id -> the target ids that spell it: () for none, one id = direct, more = split.
    spelling: target id -> the draft ids that spell it: () for none, one id = direct, more = merge. A target
        token that its own tokenizer makes from no text has none.
    """

    pieces: list[tuple[int, ...]]
    spelling: list[tuple[int, ...]]


def build_map(draft: TokenBytes, target: TokenBytes) -> VocabularyMap:
    """The map of a pair of tokenizers.

    A twin counts only if the model's own tokenizer makes it from that text: where the target splits numbers into
    digits, a draft token "12" becomes "1", "2" although the target has a token "12". Special tokens are mapped by
    role, and every end of text or turn of one side by the end of turn of the other.
    """
    pieces = _encode_each(target, draft.bytes_of)
    own = _encode_each(target, target.bytes_of)
    reachable = [text if own[t] == (t,) else None for t, text in enumerate(target.bytes_of)]
    spelling = _encode_each(draft, reachable)
    for role, d in draft.roles.items():
        if role in target.roles:
            pieces[d] = (target.roles["end_of_turn" if role in _ENDS else role],)
    for role, t in target.roles.items():
        if role in draft.roles:
            spelling[t] = (draft.roles["end_of_turn" if role in _ENDS else role],)
    vocabulary = VocabularyMap(pieces, spelling)
    verify_map(vocabulary, draft, target)
    return vocabulary


def verify_map(vocabulary: VocabularyMap, draft: TokenBytes, target: TokenBytes) -> None:
    """Raise OmniDraftError for the first entry whose bytes differ, or that maps a special token against its role."""
    for name, table, here, there in (
        ("pieces", vocabulary.pieces, draft, target),
        ("spelling", vocabulary.spelling, target, draft),
    ):
        if len(table) != here.size:
            raise OmniDraftError(
                f"vocabulary map: {name} has {len(table)} entries for {here.size} tokens; export again"
            )
        role_of: dict[int, set[str]] = {}
        for role, i in here.roles.items():
            role_of.setdefault(i, set()).update(_ENDS if role in _ENDS else (role,))
        for i, (entry, text) in enumerate(zip(table, here.bytes_of, strict=True)):
            if not entry:
                continue
            if text is None:
                roles = role_of.get(i, set())
                good = len(entry) == 1 and any(there.roles.get(role) == entry[0] for role in roles)
            else:
                good = min(entry) >= 0 and max(entry) < there.size and there.spells(entry, text)
            if not good:
                raise OmniDraftError(f"vocabulary map: the entry {i} of {name} does not spell its token; export again")


def save_map(vocabulary: VocabularyMap, path: Path, draft_sha256: str, target_sha256: str) -> None:
    """Write a map as JSON, with a checksum and the hashes of the tokenizer.json files it was made from."""
    document = {
        "schema": SCHEMA,
        "draft_sha256": draft_sha256,
        "target_sha256": target_sha256,
        "checksum": _checksum(vocabulary.pieces, vocabulary.spelling),
        "pieces": vocabulary.pieces,
        "spelling": vocabulary.spelling,
    }
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def load_map(path: Path, draft_sha256: str, target_sha256: str) -> VocabularyMap:
    """Read a map. Raises OmniDraftError if it is damaged or was made for other tokenizers."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _damaged(path, f"more than {MAX_FILE_BYTES} bytes")
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise OmniDraftError(f"{path}: cannot read the vocabulary map: {error.strerror}") from None
    except ValueError:
        raise _damaged(path, "no valid JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _damaged(path, f"its schema is not {SCHEMA}")
    for key, expected in (("draft_sha256", draft_sha256), ("target_sha256", target_sha256)):
        if document.get(key) != expected:
            side = key.removesuffix("_sha256")
            raise OmniDraftError(f"{path}: made for another {side} tokenizer ({key} differs); export the bundle again")
    pieces, spelling = document.get("pieces"), document.get("spelling")
    if not isinstance(pieces, list) or not isinstance(spelling, list):
        raise _damaged(path, "pieces or spelling is no list")
    for table, other in ((pieces, spelling), (spelling, pieces)):
        if not 0 < len(table) <= MAX_TOKENS:
            raise _damaged(path, f"{len(table)} tokens are no vocabulary")
        if set(map(type, table)) != {list} or max(map(len, table)) > MAX_SPELLING:
            raise _damaged(path, f"an entry is no list of at most {MAX_SPELLING} ids")
        ids = list(chain.from_iterable(table))
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= len(other)):
            raise _damaged(path, "an id is out of range")
    if document.get("checksum") != _checksum(pieces, spelling):
        raise _damaged(path, "its checksum differs")
    return VocabularyMap([tuple(entry) for entry in pieces], [tuple(entry) for entry in spelling])


def _damaged(path: Path, how: str) -> OmniDraftError:
    return OmniDraftError(f"{path}: damaged vocabulary map ({how}); export the bundle again")


def _encode_each(tokens: TokenBytes, texts: Sequence[bytes | None]) -> list[tuple[int, ...]]:
    """The ids of each text, () for None, for what cannot be spelled and for what takes too many tokens."""
    known = [i for i, text in enumerate(texts) if text is not None]
    result: list[tuple[int, ...]] = [()] * len(texts)
    for i, ids in zip(known, tokens.encode_many([texts[i] or b"" for i in known]), strict=True):
        if len(ids) <= MAX_SPELLING:
            result[i] = tuple(ids)
    return result


def _checksum(*tables: Sequence[Sequence[int]]) -> str:
    """SHA-256 over lengths and ids (little-endian int32)."""
    digest = hashlib.sha256()
    for table in tables:
        parts: tuple[Any, Any] = map(len, table), chain.from_iterable(table)
        for values in parts:
            numbers = np.fromiter(values, "<i4")
            digest.update(len(numbers).to_bytes(8, "little") + numbers.tobytes())
    return digest.hexdigest()
