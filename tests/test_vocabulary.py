"""The map between two vocabularies: every entry spells its token, on real pairs and small ones."""

import contextlib
import json
from functools import cache
from pathlib import Path

import pytest
import real_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_token_bytes import VALID, any_bytes, missing

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap, build_map, load_map, save_map, verify_map

GOLDEN = Path(__file__).parent / "golden"
DRAFT_HASH, TARGET_HASH = "d" * 64, "7" * 64
PAIRS = [
    ("default-drafter", "smollm2"),
    ("default-drafter", "llama2"),
    ("default-drafter", "mistral-v1"),
    ("default-drafter", "llama3"),
    ("default-drafter", "qwen3"),
    ("default-drafter", "tekken"),
    ("default-drafter", "gemma3"),
    ("smollm2", "llama2"),
    ("llama2", "smollm2"),
    ("gpt2", "mistral-v1"),
    ("llama2", "gpt2"),
]
pairs = pytest.mark.parametrize("pair", PAIRS, ids="->".join)


@cache
def built(pair: tuple[str, str]) -> tuple[TokenBytes, TokenBytes, VocabularyMap]:
    draft, target = map(real_tokenizers.load, pair)
    return draft, target, build_map(draft, target)


@cache
def small(
    draft: str = "byte_level_digits", target: str = "byte_fallback"
) -> tuple[TokenBytes, TokenBytes, VocabularyMap]:
    first, second = (TokenBytes.from_file(GOLDEN / f"{name}.tokenizer.json") for name in (draft, target))
    return first, second, build_map(first, second)


def joined(tokens: TokenBytes, ids: tuple[int, ...]) -> bytes:
    return b"".join(tokens.bytes_of[i] or b"<special>" for i in ids)


@pairs
def test_every_entry_spells_its_token(pair: tuple[str, str]) -> None:
    draft, target, vocabulary = built(pair)
    assert (len(vocabulary.pieces), len(vocabulary.spelling)) == (draft.size, target.size)
    for d, pieces in enumerate(vocabulary.pieces):
        if pieces and draft.bytes_of[d] is not None:
            assert joined(target, pieces) == draft.bytes_of[d]
    for t, spelling in enumerate(vocabulary.spelling):
        if spelling and target.bytes_of[t] is not None:
            assert joined(draft, spelling) == target.bytes_of[t]


@pairs
def test_a_twin_is_what_the_own_tokenizer_makes(pair: tuple[str, str]) -> None:
    draft, target, vocabulary = built(pair)
    for t, spelling in enumerate(vocabulary.spelling):
        text = target.bytes_of[t]
        if text is None:
            continue
        assert not spelling or target.encode(text) == [t]
        if len(spelling) == 1:  # direct twins are mutual
            assert vocabulary.pieces[spelling[0]] == (t,)
    for d, pieces in enumerate(vocabulary.pieces):
        text = draft.bytes_of[d]
        if text is not None and len(pieces) == 1 and draft.encode(text) == [d]:
            assert vocabulary.spelling[pieces[0]] == (d,)


@pairs
def test_what_has_no_translation_has_a_reason(pair: tuple[str, str]) -> None:
    draft, target, vocabulary = built(pair)
    for d, pieces in enumerate(vocabulary.pieces):
        text = draft.bytes_of[d]
        assert pieces or text is None or not missing(pair[1]).isdisjoint(text)
    for t, spelling in enumerate(vocabulary.spelling):
        text = target.bytes_of[t]
        assert spelling or text is None or not missing(pair[0]).isdisjoint(text) or target.encode(text) != [t]


@pairs
@settings(max_examples=50, deadline=None)
@given(text=VALID.map(str.encode) | any_bytes())
def test_there_and_back_gives_the_same_bytes(pair: tuple[str, str], text: bytes) -> None:
    draft, target, vocabulary = built(pair)
    if not (missing(pair[0]) | missing(pair[1])).isdisjoint(text):
        return
    there: list[int] = []
    for t in target.encode(text):
        there += vocabulary.spelling[t] or draft.encode(target.bytes_of[t] or b"")
    assert draft.spells(there, text)
    assert joined(target, tuple(i for d in there for i in vocabulary.pieces[d])) == text


@pairs
def test_special_tokens_are_mapped_by_role_only(pair: tuple[str, str]) -> None:
    draft, target, vocabulary = built(pair)
    for here, there, table in ((draft, target, vocabulary.pieces), (target, draft, vocabulary.spelling)):
        special = set(there.special.values())
        for i, entry in enumerate(table):
            if here.bytes_of[i] is not None:
                assert not special & set(entry)
            elif entry:
                assert len(entry) == 1
                assert i in here.roles.values()
                assert entry[0] in there.roles.values()


def test_ends_of_text_and_turn() -> None:
    draft, target, vocabulary = built(("default-drafter", "smollm2"))
    end = draft.special["<|end|>"]
    assert vocabulary.pieces[end] == (target.special["<|im_end|>"],)
    assert vocabulary.spelling[target.special["<|im_end|>"]] == (end,)
    assert vocabulary.spelling[target.special["<|endoftext|>"]] == (end,)
    assert vocabulary.spelling[target.special["<|im_start|>"]] == ()
    _, target, vocabulary = built(("default-drafter", "llama2"))
    assert vocabulary.pieces[end] == (target.special["</s>"],)


def test_typed_special_tokens_become_text() -> None:
    draft, target, vocabulary = built(("default-drafter", "smollm2"))
    ids = draft.encode(b"<|im_end|><|end|>")
    there = [i for d in ids for i in vocabulary.pieces[d]]
    assert target.spells(there, b"<|im_end|><|end|>")


def test_numbers_are_split_where_the_target_splits_them() -> None:
    draft, target = real_tokenizers.load("llama3"), real_tokenizers.load("llama2")
    assert len(draft.encode(b"123")) == 1
    assert [target.bytes_of[i] for i in target.encode(b"123")] == [b"1", b"2", b"3"]
    draft, target, vocabulary = small("byte_level", "byte_level_digits")
    numbers = {text: d for d, text in enumerate(draft.bytes_of) if text and text.isdigit() and len(text) > 1}
    assert numbers
    for text, d in numbers.items():
        assert [target.bytes_of[i] for i in vocabulary.pieces[d]] == [bytes([digit]) for digit in text]


def test_bytes_of_one_character_are_direct_between_byte_level_vocabularies() -> None:
    draft, target, vocabulary = built(("default-drafter", "smollm2"))
    head = b"\xf0\x9f"
    (d,), (t,) = draft.encode(head), target.encode(head)
    assert vocabulary.pieces[d] == (t,)
    assert vocabulary.spelling[t] == (d,)
    _, target, vocabulary = built(("default-drafter", "llama2"))
    assert vocabulary.pieces[d] == tuple(target.encode(head))
    assert len(vocabulary.pieces[d]) == 2


def test_save_and_load(tmp_path: Path) -> None:
    vocabulary = small()[2]
    file = tmp_path / "vocabulary.json"
    save_map(vocabulary, file, DRAFT_HASH, TARGET_HASH)
    assert load_map(file, DRAFT_HASH, TARGET_HASH) == vocabulary
    for hashes, side in (((TARGET_HASH, TARGET_HASH), "draft"), ((DRAFT_HASH, DRAFT_HASH), "target")):
        with pytest.raises(OmniDraftError, match=f"made for another {side} tokenizer"):
            load_map(file, *hashes)
    with pytest.raises(OmniDraftError, match="cannot read"):
        load_map(tmp_path / "gone.json", DRAFT_HASH, TARGET_HASH)


def corrupted(fault: str) -> str:
    _, target, vocabulary = small()
    document = {
        "schema": "omnidraft-vocabulary/1",
        "draft_sha256": DRAFT_HASH,
        "target_sha256": TARGET_HASH,
        "checksum": "0" * 64,
        "pieces": [list(entry) for entry in vocabulary.pieces],
        "spelling": [list(entry) for entry in vocabulary.spelling],
    }
    pieces = document["pieces"]
    assert isinstance(pieces, list)
    changes = {
        "a wrong twin": lambda: pieces.__setitem__(50, [51]),
        "an id out of range": lambda: pieces.__setitem__(50, [target.size]),
        "a negative id": lambda: pieces.__setitem__(50, [-1]),
        "an id that is true": lambda: pieces.__setitem__(50, [True]),
        "an id with a point": lambda: pieces.__setitem__(50, [1.0]),
        "an id that is text": lambda: pieces.__setitem__(50, ["1"]),
        "an entry that is no list": lambda: pieces.__setitem__(50, 7),
        "an endless entry": lambda: pieces.__setitem__(50, [1] * 10_000),
        "no pieces": lambda: document.pop("pieces"),
        "pieces of another type": lambda: document.update(pieces={}),
        "an empty table": lambda: document.update(pieces=[]),
        "another schema": lambda: document.update(schema="omnidraft-vocabulary/2"),
        "no checksum": lambda: document.pop("checksum"),
    }
    changes[fault]()
    return json.dumps(document)


@pytest.mark.parametrize(
    "fault",
    [
        *("a wrong twin", "an id out of range", "a negative id", "an id that is true", "an id with a point"),
        *("an id that is text", "an entry that is no list", "an endless entry", "no pieces", "pieces of another type"),
        *("an empty table", "another schema", "no checksum"),
    ],
)
def test_a_corrupted_map_is_refused(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.json"
    file.write_text(corrupted(fault), encoding="utf-8")
    with pytest.raises(OmniDraftError, match="damaged vocabulary map") as caught:
        load_map(file, DRAFT_HASH, TARGET_HASH)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(min_value=0), byte=st.integers(0, 255))
def test_any_changed_byte_is_refused_or_harmless(at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = small()[2]
    file = tmp_path_factory.getbasetemp() / "vocabulary.json"
    save_map(vocabulary, file, DRAFT_HASH, TARGET_HASH)
    text = bytearray(file.read_bytes())
    text[at % len(text)] = byte
    file.write_bytes(text)
    with contextlib.suppress(OmniDraftError):
        assert load_map(file, DRAFT_HASH, TARGET_HASH) == vocabulary


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_verify_finds_any_wrong_entry(data: st.DataObject) -> None:
    draft, target, vocabulary = small()
    verify_map(vocabulary, draft, target)
    pieces, spelling = list(vocabulary.pieces), list(vocabulary.spelling)
    table, here, there = data.draw(st.sampled_from([(pieces, draft, target), (spelling, target, draft)]))
    i = data.draw(st.integers(0, len(table) - 1))
    wrong = tuple(data.draw(st.lists(st.integers(-1, there.size + 1), min_size=1, max_size=3)))
    table[i] = wrong
    known = all(0 <= one < there.size and there.bytes_of[one] is not None for one in wrong)
    if wrong == (vocabulary.pieces, vocabulary.spelling)[table is spelling][i]:
        return
    if here.bytes_of[i] is not None and known and joined(there, wrong) == here.bytes_of[i]:
        return  # another spelling of the same bytes
    with pytest.raises(OmniDraftError, match="does not spell its token"):
        verify_map(VocabularyMap(pieces, spelling), draft, target)


def test_verify_refuses_another_vocabulary() -> None:
    draft, target, vocabulary = small()
    with pytest.raises(OmniDraftError, match="export again"):
        verify_map(VocabularyMap(vocabulary.pieces[:-1], vocabulary.spelling), draft, target)
