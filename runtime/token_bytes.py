"""Token ids as the exact bytes they stand for, and bytes as the ids a model's own tokenizer gives them.

Nothing here goes through partial strings: what is no UTF-8 stays bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from omnidraft.runtime import tokenizer_file
from omnidraft.runtime.errors import OmniDraftError

ROLES: dict[str, tuple[str, ...]] = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>"),
    "end_of_turn": ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>"),
    "start_of_turn": ("<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "<|start|>"),
    "system": ("<|system|>", "[SYSTEM_PROMPT]"),
    "user": ("<|user|>", "[INST]"),
    "assistant": ("<|assistant|>", "[/INST]"),
    "pad": ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>"),
    "unk": ("<unk>",),
}
"""Role -> contents of special tokens that play it, the first one present wins."""

_SPELL_LIMIT = 32  # longest piece tried when text is spelled by bytes alone: keeps that search linear
_BATCH = 8192
CANNOT_ENCODE = "it cannot tokenize this text"
_TO_ALPHABET = dict(enumerate(tokenizer_file.BYTE_ALPHABET))


class TokenBytes:
    """The byte view of one tokenizer.

    Attributes:
        tokenizer: the model's tokenizer in continuation form: it adds no space, no special token and no padding,
            changes no character, and takes special tokens in its input for plain text.
        size: one more than the highest token id.
        bytes_of: token id -> its bytes; None for special tokens and unused ids.
        special: content -> id of the special tokens.
        roles: role (a key of ROLES) -> id. "eos" and "end_of_turn" stand for each other where one is missing.
        prefix_space: where the model's own tokenizer puts a space in a prompt (see `tokenizer_file.prefix_space`).
    """

    def __init__(self, text: bytes, name: str) -> None:
        """Parse the content of a tokenizer.json; `name` stands for it in errors."""
        self.name = name
        document = tokenizer_file.parse(text, name)
        try:
            self.tokenizer = Tokenizer.from_buffer(text)
            settings = Tokenizer.from_str(json.dumps(tokenizer_file.continuation_settings(document)))
        except BaseException as error:
            raise _fault(name, "the tokenizers package cannot load it", error) from None
        self.tokenizer.normalizer = settings.normalizer
        self.tokenizer.pre_tokenizer = settings.pre_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.prefix_space = tokenizer_file.prefix_space(document)
        self._byte_level = tokenizer_file.is_byte_level(document)
        added = document["added_tokens"]
        self.special = {token["content"]: token["id"] for token in added if token["special"]}
        self.size, self.bytes_of = tokenizer_file.read_bytes(document, self._byte_level, name)
        self.roles = _find_roles(self.special)

    @classmethod
    def from_file(cls, path: Path) -> TokenBytes:
        """Read a tokenizer.json. Raises OmniDraftError if it is missing, too large, damaged or of another kind."""
        try:
            if path.stat().st_size > tokenizer_file.MAX_FILE_BYTES:
                limit = f"{tokenizer_file.MAX_FILE_BYTES >> 20} MiB"
                raise OmniDraftError(f"{path}: larger than the {limit} a tokenizer.json may have; check the file")
            return cls(path.read_bytes(), str(path))
        except OSError as error:
            raise OmniDraftError(f"{path}: cannot read the tokenizer: {error.strerror}") from None

    def fit(self, vocabulary: int) -> None:
        """Cover the rows of a model: ids beyond the tokenizer have no bytes, tokens beyond the model are forgotten."""
        self.bytes_of = self.bytes_of[:vocabulary] + [None] * (vocabulary - len(self.bytes_of))
        self.size = min(self.size, vocabulary)
        self.special = {content: i for content, i in self.special.items() if i < vocabulary}
        self.roles = {role: i for role, i in self.roles.items() if i < vocabulary}

    def encode_prompt(self, parts: Sequence[int | bytes]) -> list[int]:
        """Ids of a prompt given as special ids and the text between them, with the spaces the tokenizer adds."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            wanted = {
                "never": False,
                "first": number == 0 and not part.startswith(b" "),
                "missing": not part.startswith(b" "),
                "always": True,
            }[self.prefix_space]
            ids += self.encode(b" " + part if wanted and part else part)
        return ids

    def encode(self, text: bytes) -> list[int]:
        """The ids the model's own tokenizer gives `text` as a continuation of other text.

        The ids' bytes joined are `text`, whatever it holds: bytes that are no UTF-8 are spelled by the tokens that
        have these bytes. Raises OmniDraftError if the vocabulary cannot spell it.
        """
        try:
            string = text.decode()
        except UnicodeDecodeError:
            return self._encode_bytes(text)
        ids = self._tokenized(string)
        return ids if self.spells(ids, text) else self._encode_bytes(text)

    def encode_many(self, texts: Sequence[bytes]) -> list[list[int]]:
        """`encode` of each text, in batches; [] for one the vocabulary cannot spell."""
        result: list[list[int]] = []
        for start in range(0, len(texts), _BATCH):
            chunk = texts[start : start + _BATCH]
            strings = [text.decode(errors="replace") for text in chunk]
            try:
                encodings = self.tokenizer.encode_batch_fast(strings, add_special_tokens=False)
            except BaseException as error:
                raise _fault(self.name, CANNOT_ENCODE, error) from None
            for text, encoding in zip(chunk, encodings, strict=True):
                ids = encoding.ids
                result.append(ids if self.spells(ids, text) else self._encode_or_nothing(text))
        return result

    def spells(self, ids: Iterable[int], text: bytes) -> bool:
        """Whether the bytes of `ids` joined are `text`; never if one of them has none, or is beyond the model."""
        pieces: list[Any] = [self.bytes_of[i] if i < len(self.bytes_of) else None for i in ids]
        return None not in pieces and b"".join(pieces) == text

    def _tokenized(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            raise _fault(self.name, CANNOT_ENCODE, error) from None
        return ids

    def _encode_or_nothing(self, text: bytes) -> list[int]:
        try:
            return self.encode(text)
        except OmniDraftError:
            return []

    def _encode_bytes(self, text: bytes) -> list[int]:
        """Ids for bytes that no string stands for, or that the tokenizer would change."""
        if text in self._id_of:
            return [self._id_of[text]]
        ids: list[int] = []
        for part in self._parts(text):
            found = self._encode_part(part)
            ids += found if self.spells(found, part) else self._spell(part)
        return ids

    def _parts(self, text: bytes) -> list[bytes]:
        """`text` cut where the tokenizer's merges cannot reach across."""
        string = text.decode(errors="surrogateescape")
        if not self._byte_level:
            # A "▁" in the text is not the space that this character stands for inside the vocabulary.
            runs = re.split(f"([\udc80-\udcff{tokenizer_file.SPACE}]+)", string)
            return [run.encode(errors="surrogateescape") for run in runs if run]
        whole = re.sub("[\udc80-\udcff]+", _stand_in, string)
        try:
            words = self.tokenizer.pre_tokenizer.pre_tokenize_str(whole)
        except BaseException as error:
            raise _fault(self.name, CANNOT_ENCODE, error) from None
        cuts = sorted({0, len(string), *(start for _, (start, _) in words)})
        return [string[start:end].encode(errors="surrogateescape") for start, end in pairwise(cuts)]

    def _encode_part(self, part: bytes) -> list[int]:
        if self._byte_level:
            word = part.decode("latin-1").translate(_TO_ALPHABET)
            try:
                return [token.id for token in self.tokenizer.model.tokenize(word)]
            except BaseException as error:
                raise _fault(self.name, CANNOT_ENCODE, error) from None
        try:
            return self._tokenized(part.decode())
        except UnicodeDecodeError:
            return []

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        """Bytes -> id; a piece goes before an added token and before a byte token of the same bytes."""
        added = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if not token.special}
        ordinary: dict[bytes, int] = {}
        late: dict[bytes, int] = {}
        for i, piece in enumerate(self.bytes_of):
            if piece is not None:
                name = self.tokenizer.id_to_token(i) or ""
                is_byte = not self._byte_level and len(piece) == 1 and name.startswith("<0x")
                (late if is_byte or i in added else ordinary).setdefault(piece, i)
        return late | ordinary

    def _spell(self, text: bytes) -> list[int]:
        """The fewest tokens whose bytes joined are `text`."""
        id_of = self._id_of
        fewest = [0] + [len(text) + 1] * len(text)
        last = [0] * (len(text) + 1)
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - _SPELL_LIMIT), end):
                if fewest[start] + 1 < fewest[end] and text[start:end] in id_of:
                    fewest[end], last[end] = fewest[start] + 1, start
        if fewest[-1] > len(text):
            unknown = text[:32].hex(" ")
            raise OmniDraftError(f"{self.name}: has no tokens for the bytes {unknown}; remove them from the text")
        ids = []
        end = len(text)
        while end:
            ids.append(id_of[text[last[end] : end]])
            end = last[end]
        return ids[::-1]


def _fault(name: str, what: str, error: BaseException) -> BaseException:
    """What to raise for a fault of the tokenizers package, which has plain Exception, and panics, for all of them.

    A panic (a regular expression that takes too many steps) is a BaseException that cannot be imported.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return OmniDraftError(f"{name}: {what}: {str(error)[:200]}")
    return error


def _stand_in(run: re.Match[str]) -> str:
    """Characters for a run of stray bytes, of the class (letter or symbol) its whole character likely has."""
    lead = ord(run[0][0]) - 0xDC00
    letter = 0xC3 <= lead <= 0xED and lead != 0xE2
    return ("一" if letter else "\ufffd") * len(run[0])


def _find_roles(special: dict[str, int]) -> dict[str, int]:
    roles = {}
    for role, contents in ROLES.items():
        found = [special[content] for content in contents if content in special]
        if found:
            roles[role] = found[0]
    ends = [roles[role] for role in ("end_of_turn", "eos") if role in roles]
    return {"eos": ends[-1], "end_of_turn": ends[0], **roles} if ends else roles
