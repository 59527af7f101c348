"""From messages to token ids, for a target or a drafter, each by its own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omnidraft.runtime.bundle import Bundle, ModelInfo
from omnidraft.runtime.chat import ChatTemplate, encode_prompt, utf8
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.untrusted import MIB, read_limited

Message = dict[str, str]


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """A plain prompt as one user message. Raises OmniDraftError if it is neither text nor messages, or empty."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise OmniDraftError('a prompt is a text, or a list of {"role": text, "content": text}')
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise OmniDraftError("the prompt is empty; give some text")
    return messages


def read_template(path: Path, specials: Mapping[str, str]) -> ChatTemplate:
    """The chat template in a file. Raises OmniDraftError if it is none; OSError."""
    try:
        source = read_limited(path, MIB).decode()
    except ValueError as error:  # too large, or no UTF-8
        raise OmniDraftError(f"{path}: not a chat template ({error}); export the bundle again") from None
    return ChatTemplate(source, specials, str(path))


class PromptEncoder:
    """Encodes prompts for one model of a bundle."""

    def __init__(self, bundle: Bundle, model: ModelInfo, tokens: TokenBytes) -> None:
        """Reads the chat template, if the model has one."""
        self._tokens = tokens
        self._begin = [] if model.bos is None else [model.bos]
        #: What stands before a text in the model's training: bos, or the end token of another document.
        self.boundary = self._begin or list(model.stop_ids[:1])
        self.template: ChatTemplate | None = None
        if model.chat_template is not None:
            bundle.verify([model.chat_template])
            self.template = read_template(bundle.path / model.chat_template, model.template_tokens)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered template, up to where the model answers. Needs a template."""
        assert self.template is not None
        return self._tokens.encode_prompt(encode_prompt(self.template, list(messages), self._tokens.special))

    def raw(self, text: str) -> list[int]:
        """Token ids of text to be continued."""
        # HF puts bos before a text that was encoded on its own, so the text is still the first segment.
        return self._begin + self._tokens.encode_prompt([utf8(text)])
