"""The drafter's tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.tools.training.rows import Row

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> None:
    """Write a byte-level BPE tokenizer.json of at most `vocabulary` tokens.

    Digits stand alone, as in most targets, so that numbers need no splits.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    temporary = path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    temporary.replace(path)


def write_settings(folder: Path, context: int) -> None:
    """Write the tokenizer_config.json that belongs to `train_tokenizer`."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def encode_rows(rows: Iterable[Row], tokens: TokenBytes) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers) in draft ids, as CHAT_TEMPLATE renders them.

    What looks like a special token inside a text stays text. An answer that was cut off has no end token.
    """
    rows = list(rows)
    user, assistant, end = (tokens.special[name] for name in (USER, ASSISTANT, END))
    prompts = tokens.encode_many([row.prompt.encode(errors="replace") for row in rows])
    answers = tokens.encode_many([row.answer.encode(errors="replace") for row in rows])
    return (
        [[user, *ids, assistant] for ids in prompts],
        [ids + [end] * row.finished for ids, row in zip(answers, rows, strict=True)],
    )
