"""Makes the golden tokenizers and tests/golden/translations.json anew: python tests/golden/make_translations.py

Other implementations (a browser page, a phone) must reproduce translations.json from the three tokenizer files.
`--tokenizers` trains these anew as well, which changes every number: only needed if a family is added.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import VocabularyMap, build_map

FOLDER = Path(__file__).parent
FILE = FOLDER / "translations.json"
TOKENIZERS = ("byte_level", "byte_level_digits", "byte_fallback")
PAIRS = (
    ("byte_level_digits", "byte_level"),
    ("byte_level_digits", "byte_fallback"),
    ("byte_fallback", "byte_level"),
    ("byte_level", "byte_level_digits"),
)
SENTENCES = (
    "The drafter guesses a few tokens, and the target checks them all in one pass.",
    "When the guess is right the answer comes sooner; when it is wrong nothing is lost but a little time.",
    "There were 12 apples and 34 pears, so together they had 46 pieces of fruit in 2024.",
    "She said that the other children would rather stay at home and read than walk through the rain.",
    "def add(first, second):\n    return first + second\n\n\nfor number in range(10):\n    print(add(number, 1))\n",
    "Der Fluss fließt über die Wiese, où l'été s'achève; mañana será otro día.",
    "東京は日本の首都です。東京の人口は多い。日本語の文。 😀 😀 🎉 Привет, как дела? مرحبا بالعالم",
    "It is what it is: some words are long, others are short, and the rest of them are in between.",
)
SAMPLES: tuple[bytes, ...] = (
    b"",
    b"The target checks the answer.",
    b" leading and  double   spaces ",
    b"There were 12 apples in 2024",
    b"She said that other children would walk home through the rain.",
    b"    return first + second\n\n\nfor number in range(10):\n    print(add(number, 1))\n",
    b"def add(first):\n\treturn first + 1\n\n\n",
    "über die Wiese, où l'été".encode(),
    "東京の首都。".encode(),
    "日本\u3000語\u00a0x".encode(),
    "😀 and 👩‍👩‍👧 and 🎉".encode(),
    "مرحبا Привет שלום".encode(),
    "e\u0301 o\u0308 \u2581 x".encode(),
    "😀".encode()[:2],
    "a 東".encode()[:-1],
    "東京 b".encode()[1:],
    b"\xff\xfe\x00 \x80",
    b"<|im_end|></s><|end|> typed by a user",
)


def train() -> None:
    """Train the tokenizers: about 600 tokens each, each on another part of SENTENCES."""
    end = ["<|end|>", "<|user|>", "<|assistant|>"]
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    for name, before, specials, text in (
        ("byte_level", words, chat, SENTENCES[3:]),
        ("byte_level_digits", digits, end, SENTENCES[:5]),
    ):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(text, trainer)
        _write(name, json.loads(tokenizer.to_str()))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=620, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[::2] + SENTENCES[5:], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    _write("byte_fallback", document)


def _write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=1)
    (FOLDER / f"{name}.tokenizer.json").write_text(text + "\n", encoding="utf-8")


def load(name: str) -> TokenBytes:
    """One of TOKENIZERS."""
    return TokenBytes.from_file(FOLDER / f"{name}.tokenizer.json")


def kinds(ids: list[int], table: list[tuple[int, ...]], several: str) -> list[str]:
    """How each id is translated: "none", "direct", or the word for several ids."""
    return [("none", "direct")[len(table[i])] if len(table[i]) < 2 else several for i in ids]


def case(draft: str, target: str, text: bytes, tokens: dict[str, TokenBytes], vocabulary: VocabularyMap) -> Any:
    """One text in both vocabularies, and how each token of it is translated."""
    draft_ids, target_ids = tokens[draft].encode(text), tokens[target].encode(text)
    return {
        "draft": draft,
        "target": target,
        "bytes": text.hex(),
        "draft_ids": draft_ids,
        "target_ids": target_ids,
        "draft_kinds": kinds(draft_ids, vocabulary.pieces, "split"),
        "target_kinds": kinds(target_ids, vocabulary.spelling, "merge"),
        "pieces": [vocabulary.pieces[i] for i in draft_ids],
        "spelling": [vocabulary.spelling[i] for i in target_ids],
    }


def translations() -> list[dict[str, Any]]:
    """Every sample for every pair."""
    tokens = {name: load(name) for name in TOKENIZERS}
    maps = {(draft, target): build_map(tokens[draft], tokens[target]) for draft, target in PAIRS}
    return [case(draft, target, text, tokens, maps[draft, target]) for draft, target in PAIRS for text in SAMPLES]


def main() -> None:
    """Write the files."""
    if "--tokenizers" in sys.argv[1:]:
        train()
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in translations())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
