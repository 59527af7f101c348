"""What a client may ask for: OpenAI's requests, as far as they have a meaning here. Anything else is refused."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from omnidraft.runtime.prompt import Message as PromptMessage
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.server.errors import ApiError

# Parameters that nothing is done for, with the value that asks for nothing: clients send them out of habit.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tools": [],
}


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it, see `Engine.stream`. `max_new_tokens` None: as the server decides."""

    model: str
    prompt: str | list[PromptMessage]
    raw: bool
    sampling: Sampling
    max_new_tokens: int | None
    stop: list[str]
    top_logprobs: int | None


class _Strict(BaseModel):
    """Refuses what it does not know. A field that is null counts as left out, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def _as_text(content: Any) -> Any:
    """A message's text, be it in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of type {kind!r} cannot be read; these models read text only")
        texts.append(part["text"])
    return "".join(texts)


class Message(_Strict):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)]


class StreamOptions(_Strict):
    """`include_usage`: close the stream with the usage."""

    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Request(_Strict):
    """What both kinds of request have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in NEUTRAL.items():
            if data.get(name) not in (None, value):
                raise ValueError(f"{name}: not supported, but for {value!r}, which asks for nothing")
        return {name: value for name, value in data.items() if name not in NEUTRAL}

    @model_validator(mode="after")
    def _streams_with_options(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def sampling(self) -> Sampling:
        """How to draw; with a new seed where none is given. Raises OmniDraftError."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, seed)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: is the old name of max_completion_tokens; give one of them")
        return self

    def asked(self) -> Asked:
        """The same as the engine takes it. Raises OmniDraftError for sampling outside its range."""
        roles = {"developer": "system"}
        messages = [{"role": roles.get(m.role, m.role), "content": m.content} for m in self.messages]
        limit = self.max_completion_tokens or self.max_tokens
        top = (self.top_logprobs or 0) if self.logprobs else None
        return Asked(self.model, messages, False, self.sampling, limit, self.stop, top)


class CompletionRequest(_Request):
    """POST /v1/completions: text to go on from, without the chat template."""

    prompt: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def asked(self) -> Asked:
        """The same as the engine takes it. Raises OmniDraftError for sampling outside its range."""
        return Asked(self.model, self.prompt[0], True, self.sampling, self.max_tokens, self.stop, self.logprobs)


class LearningRequest(_Strict):
    """PUT /learning."""

    on: bool


Kind = TypeVar("Kind", bound=_Strict)


def read(kind: type[Kind], body: bytes) -> Kind:
    """A request from its JSON. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"{field}: not supported", "unsupported_parameter", field)
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if first["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        if not field:  # a check of the whole request says itself which field it means
            raise ApiError(400, message, param=message.partition(":")[0])
    raise ApiError(400, f"{field or 'the body'}: {message[:1].lower()}{message[1:]}", param=field or None)
