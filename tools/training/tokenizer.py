"""The tokenizer of a model that is trained here, and how it spells a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.tools.training.rows import Row


@dataclass(frozen=True)
class Dialect:
    """How an architecture's models split text, and what stands around a user's words and an answer.

    `splits`: settings of the tokenizers' own pre-tokenizers, all in front of bytes. `special`: the special tokens, the
    one that ends an answer first. `before` and `between`: special tokens and text before a prompt, and before its
    answer; the end token follows the answer. `template`: the same as a chat template.
    """

    splits: str | None
    special: tuple[str, ...]
    before: tuple[str, ...]
    between: tuple[str, ...]
    template: str


DIALECTS = {
    "llama": Dialect(
        splits=None,
        special=("<|end|>", "<|user|>", "<|assistant|>"),
        before=("<|user|>",),
        between=("<|assistant|>",),
        template=(
            "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
            "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    ),
    "qwen3": Dialect(
        splits=(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        special=("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        before=("<|im_start|>", "user\n"),
        between=("<|im_end|>", "\n", "<|im_start|>", "assistant\n"),
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    ),
}
"""By the model_type of the configuration; the pattern of qwen3 is that of the published Qwen3 tokenizers."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path, dialect: Dialect) -> None:
    """Write a byte-level BPE tokenizer.json of at most `vocabulary` tokens.

    Digits stand alone, as in most targets, so that numbers need no splits.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if dialect.splits is None
        else pre_tokenizers.Split(Regex(dialect.splits), "isolated")
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=dialect.splits is None)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(dialect.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    temporary = path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    temporary.replace(path)


def write_settings(folder: Path, context: int, dialect: Dialect) -> None:
    """Write the tokenizer_config.json that belongs to `train_tokenizer`."""
    end = dialect.special[0]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "eos_token": end, "pad_token": end, "clean_up_tokenization_spaces": False,
        "chat_template": dialect.template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def encode_rows(rows: Iterable[Row], tokens: TokenBytes) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers) in ids, as the chat template of the tokenizer's dialect renders them.

    What looks like a special token inside a text stays text. An answer that was cut off has no end token.
    """
    rows = list(rows)
    dialect = next(d for d in DIALECTS.values() if d.special[0] in tokens.special)
    before, between = ([i for part in parts for i in _ids(part, tokens)] for parts in (dialect.before, dialect.between))
    end = tokens.special[dialect.special[0]]
    prompts = tokens.encode_many([row.prompt.encode(errors="replace") for row in rows])
    answers = tokens.encode_many([row.answer.encode(errors="replace") for row in rows])
    return (
        [[*before, *ids, *between] for ids in prompts],
        [ids + [end] * row.finished for ids, row in zip(answers, rows, strict=True)],
    )


def _ids(part: str, tokens: TokenBytes) -> list[int]:
    special = tokens.special.get(part)
    return tokens.encode(part.encode()) if special is None else [special]
