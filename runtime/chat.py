"""Chat templates: messages to the text a model was trained on, without letting a message pose as the template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.template_limits import MAX_SOURCE, BoundedEnvironment, clock

Message = dict[str, Any]


class ChatTemplate:
    """A Jinja chat template, run as Hugging Face runs it: the same options and functions, and the filters in use.

    It runs in a sandbox that bounds what it does (see `template_limits`).

    `specials`: variables such as bos_token and eos_token. `name` begins every error, so give it the file's path.
    Raises OmniDraftError for a template that does not parse or fails.
    """

    def __init__(self, source: str, specials: Mapping[str, str], name: str = "chat template") -> None:
        self._name = name
        self._specials = dict(specials)
        self._environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._environment.globals["raise_exception"] = _raise_exception
        self.source = source
        if len(source) > MAX_SOURCE:
            raise self.error(f"{len(source)} characters, at most {MAX_SOURCE} are run")
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # a template can fail in any way that Python can
            raise self.error(error) from None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, now: datetime | None = None
    ) -> str:
        """The text of a conversation, special tokens written out.

        Messages are {"role": ..., "content": ...}; `now`: what a template that writes the date takes for it.
        """
        self._environment.begin([messages, self._specials])
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=clock(now or datetime.now()),
                **self._specials,
            )
        except Exception as error:
            raise self.error(error) from None

    def error(self, error: Exception | str) -> OmniDraftError:
        """The one line for what went wrong with this template."""
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return OmniDraftError(f"{self._name}{line}: the chat template fails: {why}")


def encode_prompt(
    template: ChatTemplate, messages: Sequence[Message], special: Mapping[str, int], add_generation_prompt: bool = True
) -> list[int | bytes]:
    """The rendered text, cut into ids of special tokens *written by the template* and plain UTF-8 between them.

    `special`: text of each special token -> its id. One that is spelled inside a message stays plain text. How: a
    character that occurs nowhere goes behind every character of the messages that begins some special token, so that
    none can match there; after cutting it is taken out. Where this disturbs a template that looks into the messages
    (the text without the guards is not what it renders without them), only whole special tokens are guarded. Raises
    OmniDraftError if that disturbs it too: such a message cannot be encoded safely.
    """
    now = datetime.now()  # one clock for all renderings
    plain = template.render(messages, add_generation_prompt, now)
    if not special:
        return [utf8(plain)] if plain else []
    names = sorted(special, key=len, reverse=True)
    whole = "|".join(re.escape(name) for name in names)
    heads = "|".join(sorted({re.escape(name[0]) for name in names}))
    known = {*template.source, *plain, *"".join(names), *json.dumps(messages, ensure_ascii=False, default=str)}
    guard = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in known)
    for pattern in (heads, f"(?=(?:{whole}))."):
        guarded = _mapped(messages, _guarding(re.compile(pattern, re.DOTALL), guard))
        text = template.render(guarded, add_generation_prompt, now)
        if text.replace(guard, "") == plain:
            pieces = re.split(f"({whole})", text)
            return [
                special[piece] if index % 2 else utf8(piece.replace(guard, ""))
                for index, piece in enumerate(pieces)
                if piece
            ]
    raise template.error("it reacts to special tokens spelled in a message; take them out of the message")


class _Generation(Extension):
    """{% generation %}: marks the assistant's text for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def utf8(text: str) -> bytes:
    """The bytes of a prompt's text. Raises OmniDraftError for half a surrogate pair."""
    try:
        return text.encode("utf-8", "surrogateescape")  # bytes of a command line that were not UTF-8
    except UnicodeEncodeError:
        raise OmniDraftError("prompt: holds half a surrogate pair, which is no text; remove it") from None


def _guarding(pattern: re.Pattern[str], guard: str) -> Callable[[str], str]:
    return lambda text: pattern.sub(lambda match: match[0] + guard, text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
