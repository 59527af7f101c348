"""Chat templates rendered once, around a message that is still to come: for hosts that have no Jinja."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from omnidraft.runtime.bundle import Bundle, ModelInfo
from omnidraft.runtime.chat import ChatTemplate, encode_prompt, utf8
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.prompt import PromptEncoder
from omnidraft.runtime.token_bytes import TokenBytes

MARK = "\uf8ff"
# A frame must give what the template gives for all of these.
PROBES = ("a", "  two  words ", "one\n\ntwo\n", "<|im_end|></s>{{ x }}", "naïve 漢字 😀", "\t")

Frame = dict[str, Any]


def frame_of(bundle: Bundle, info: ModelInfo, warn: Callable[[str], None]) -> Frame | None:
    """What a model's template puts around one user message; None for a model without a template."""
    tokens = TokenBytes.from_file(bundle.path / info.tokenizer)
    tokens.fit(info.vocabulary)
    template = PromptEncoder(bundle, info, tokens).template
    if template is None:
        return None
    name = str(bundle.path / str(info.chat_template))
    if _render(template, MARK, datetime(2001, 2, 3)) != _render(template, MARK, datetime(2024, 11, 12)):
        warn(f"{name}: writes the date; the package will always say today's")
    return frame(template, tokens.special, name)


def frame(template: ChatTemplate, special: Mapping[str, int], name: str) -> Frame:
    """{"parts", "trim"}: ids of special tokens, texts, and one {"before", "after"} where the message goes.

    `trim`: the message is stripped first. `name`: the template's file, for errors. Raises OmniDraftError for a template
    that does more with a message.
    """
    pieces = _pieces(_render(template, MARK, datetime.now()), special)
    holders = [p for p in pieces if isinstance(p, str) and MARK in p]
    if len(holders) != 1 or holders[0].count(MARK) != 1:
        raise OmniDraftError(
            f"{name}: does not write the message once, and cannot be rendered ahead; take another target"
        )
    parts: list[Any] = [_holder(p) if p is holders[0] else p for p in pieces]
    for trim in (False, True):
        made = {"parts": parts, "trim": trim}
        if all(filled(made, probe) == encode_prompt(template, [_message(probe)], special) for probe in PROBES):
            return made
    raise OmniDraftError(f"{name}: changes the message, and cannot be rendered ahead; take another target")


def filled(made: Frame, message: str) -> list[int | bytes]:
    """The prompt of a message, as `TokenBytes.encode_prompt` takes it. What web/prompt.mjs does."""
    inside = message.strip() if made["trim"] else message
    texts = [p["before"] + inside + p["after"] if isinstance(p, dict) else p for p in made["parts"]]
    return [utf8(part) if isinstance(part, str) else part for part in texts if part != ""]


def _pieces(text: str, special: Mapping[str, int]) -> list[int | str]:
    names = sorted(special, key=len, reverse=True)
    cut = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return [special[piece] if index % 2 else piece for index, piece in enumerate(cut) if piece]


def _holder(text: str) -> dict[str, str]:
    before, after = text.split(MARK)
    return {"before": before, "after": after}


def _render(template: ChatTemplate, message: str, now: datetime) -> str:
    return template.render([_message(message)], now=now)


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
