"""Answers in the shapes of OpenAI's API, with what we say beside them under `speculative`."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from omnidraft.runtime.report import Report
from omnidraft.tools.server.answer import Likely, Piece

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(report: Report) -> Json:
    """Tokens, and how they came about."""
    counts = report.counts
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
        "speculative": {
            "proposed": counts["proposed"],
            "accepted": counts["accepted"],
            "target_passes": counts["passes"],
            "acceptance_rate": _rounded(report.acceptance_rate),
            "tokens_per_verify": _rounded(report.tokens_per_verify),
            "tokens_per_second": _rounded(report.tokens_per_second),
            "draft": report.draft,
            "drafter_failure": report.drafter_failure or None,
            "lossless": report.lossless,
            "seed": report.seed,
        },
    }


class Shape(ABC):
    """How one answer is told, whole or in parts."""

    prefix: ClassVar[str]
    name: ClassVar[str]
    part_name: ClassVar[str]

    def __init__(self, model: str, fingerprint: str) -> None:
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, pieces: Sequence[Piece], report: Report) -> Json:
        """The answer at once."""
        said = self._said("".join(piece.text for piece in pieces))
        logprobs = self._logprobs([piece.likely for piece in pieces if piece.likely is not None])
        return {**self._body(self.name, said, logprobs, report.finish_reason), "usage": usage(report)}

    def opening(self) -> list[Json]:
        """What goes before the text."""
        return []

    def part(self, piece: Piece) -> Json:
        """One piece of the text, with the draft tokens of the answer so far."""
        drafted = {"from_draft": piece.from_draft, "proposed": piece.proposed, "accepted": piece.accepted}
        logprobs = self._logprobs([] if piece.likely is None else [piece.likely])
        return self._body(self.part_name, {**self._adds(piece.text), "speculative": drafted}, logprobs)

    def closing(self, report: Report) -> Json:
        """What goes behind the text."""
        return self._body(self.part_name, self._adds(""), finish_reason=report.finish_reason)

    def usage(self, report: Report) -> Json:
        """The last part, where usage was asked for."""
        return {**self._common, "object": self.part_name, "choices": [], "usage": usage(report)}

    def _body(self, name: str, choice: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, **choice, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._common, "object": name, "choices": [choice]}

    @abstractmethod
    def _said(self, text: str) -> Json: ...

    @abstractmethod
    def _adds(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs(self, found: list[Likely]) -> Json | None: ...


class Chat(Shape):
    """/v1/chat/completions."""

    prefix, name, part_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """Who speaks."""
        return [self._body(self.part_name, {"delta": {"role": "assistant", "content": ""}})]

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _adds(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, found: list[Likely]) -> Json | None:
        if not found:
            return None
        tokens = [{**_token(t.token, t.logprob), "top_logprobs": [_token(*one) for one in t.top]} for t in found]
        return {"content": tokens, "refusal": None}


class Completion(Shape):
    """/v1/completions."""

    prefix, name, part_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fingerprint: str) -> None:
        super().__init__(model, fingerprint)
        self._offset = 0  # characters of the tokens so far

    def _said(self, text: str) -> Json:
        return {"text": text}

    def _adds(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, found: list[Likely]) -> Json | None:
        if not found:
            return None
        offsets = []
        for likely in found:
            offsets.append(self._offset)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in likely.token)  # of a character, the first byte counts
        return {
            "tokens": [_text(likely.token) for likely in found],
            "token_logprobs": [likely.logprob for likely in found],
            "top_logprobs": [{_text(token): value for token, value in reversed(likely.top)} for likely in found],
            "text_offset": offsets,
        }


def _token(token: bytes, logprob: float) -> Json:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
