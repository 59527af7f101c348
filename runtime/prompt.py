"""From messages to token ids, for a target or a drafter, each by its own chat template."""

from __future__ import annotations

from collections.abc import Sequence

from omnidraft.runtime.bundle import Bundle, ModelInfo
from omnidraft.runtime.chat import ChatTemplate, encode_prompt, utf8
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes

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
            source = (bundle.path / model.chat_template).read_text(encoding="utf-8")
            names = {"bos_token": model.bos, "eos_token": model.stop_ids[0] if model.stop_ids else None}
            content = {id: text for text, id in tokens.special.items()}
            self.template = ChatTemplate(source, {k: content.get(v, "") for k, v in names.items() if v is not None})

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered template, up to where the model answers. Needs a template."""
        assert self.template is not None
        ids: list[int] = []
        first = True
        for part in encode_prompt(self.template, list(messages), self._tokens.special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode(part, first)
                first = False
        return ids

    def raw(self, text: str) -> list[int]:
        """Token ids of text to be continued."""
        return self._begin + self._encode(utf8(text), True)

    def _encode(self, text: bytes, first: bool) -> list[int]:
        """SentencePiece models put a space before the first word of a prompt."""
        return self._tokens.encode(b" " + text if first and self._tokens.prefix_space else text)
