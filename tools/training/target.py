"""The target as training sees it: its tokenizer, its chat template, and where its user's turn begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from omnidraft.export.sources import Source, locate, resolve
from omnidraft.runtime.chat import ChatTemplate, encode_prompt
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.tools.training.rows import Row

LONGEST = 1024  # tokens of a prompt with its answer that the target reads
MARK = b"@@question@@"


@dataclass(frozen=True)
class Target:
    """A checkpoint's description with its tokenizer."""

    source: Source
    tokens: TokenBytes

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, None if the checkpoint has none."""
        if self.source.chat_template is None:
            return None
        return ChatTemplate(
            self.source.chat_template, self.source.template_tokens, f"{self.source.name}: chat template"
        )

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(LONGEST, self.source.context)

    @property
    def stop(self) -> int | None:
        """The id that ends an answer in training text, None if the target has none."""
        turn = self.tokens.roles.get("end_of_turn")
        return turn if turn in self.source.stop_ids else next(iter(self.source.stop_ids), None)

    def chat(self, prompt: str) -> list[int]:
        """Ids of a prompt as the runtime gives them to this target."""
        return self.tokens.encode_prompt(self._parts(prompt))

    def answer(self, row: Row) -> list[int]:
        """Ids of an answer, with the stop id if it was finished."""
        ids = self.tokens.encode(row.answer.encode(errors="replace"))
        return [*ids, self.stop] if row.finished and self.stop is not None else ids

    def header(self) -> list[int]:
        """Ids of a conversation up to where the user's words begin. Raises OmniDraftError without a chat template."""
        if self.template is None:
            raise OmniDraftError(
                f"--invent: {self.source.name} has no chat template, so it has no user; give --prompts"
            )
        parts: list[int | bytes] = []
        for part in self._parts(MARK.decode()):
            if isinstance(part, bytes) and MARK in part:
                return self.tokens.encode_prompt([*parts, part[: part.index(MARK)]])
            parts.append(part)
        raise OmniDraftError(
            f"--invent: the chat template of {self.source.name} changes the user's words; use --prompts"
        )

    def _parts(self, prompt: str) -> list[int | bytes]:
        if self.template is None:
            begin: list[int | bytes] = [] if self.source.bos is None else [self.source.bos]
            return [*begin, prompt.encode(errors="replace")]
        messages = [{"role": "user", "content": prompt}]
        return encode_prompt(self.template, messages, self.tokens.special)


def open_target(name: str) -> Target:
    """Find and read a checkpoint; names as for `omnidraft export`. Raises OmniDraftError as that does."""
    source = resolve(locate(name))
    tokens = TokenBytes.from_file(source.tokenizer)
    tokens.fit(source.vocabulary)
    return Target(source, tokens)
