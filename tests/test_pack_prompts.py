"""Chat templates rendered ahead, for hosts without Jinja: what the template gives, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoints import TEMPLATE

from omnidraft.runtime.chat import ChatTemplate, encode_prompt
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.packages.prompts import PROBES, filled, frame

SPECIAL = {"<|end|>": 0, "<|user|>": 1, "<|assistant|>": 2}


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        "You are kind.\n{% for m in messages %}<|user|>\n{{ m.content | trim }}<|end|>\n{% endfor %}<|assistant|>\n",
        "{{ messages[0].content }}",
        "{{ messages[0].content.strip() + '\n' }}<|assistant|>{{ strftime_now('%Y') }}",
    ],
)
def test_a_frame_gives_what_the_template_gives(source: str) -> None:
    template = ChatTemplate(source, {})
    made: dict[str, Any] = json.loads(json.dumps(frame(template, SPECIAL, "x.jinja")))
    for message in (*PROBES, "<|user|> typed by a user", " x "):
        expected = encode_prompt(template, [{"role": "user", "content": message}], SPECIAL)
        assert filled(made, message) == expected


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0].content | upper }}", "changes the message"),
        ("{{ messages[0].content[:3] }}<|end|>", "changes the message"),
        ("{{ messages[0].content }} {{ messages[0].content }}", "write the message once"),
        ("hello", "write the message once"),
    ],
)
def test_a_template_that_does_more_is_refused(source: str, why: str) -> None:
    with pytest.raises(OmniDraftError, match=f"^x.jinja: [^\n]*{why}[^\n]*$"):
        frame(ChatTemplate(source, {}), SPECIAL, "x.jinja")
