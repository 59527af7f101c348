"""When to stop, and which text may be shown: the one machine that every emitted token goes through."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from omnidraft.runtime.errors import OmniDraftError


class StopMachine:
    """Turns emitted token ids into text until a stop token, a stop string or the budget ends it.

    Plain and speculative decoding both push token by token, so they end at the same place. The text is the UTF-8 of
    all tokens' bytes (U+FFFD for what is not UTF-8) up to the first stop string. "First" is the one completed first,
    and of those completed by the same character the longest: this depends on the text alone, not on how tokens cut it.
    Text that may turn out to be the beginning of a stop string, or half a character, is held back.

    `bytes_of`: token id -> bytes, None for special tokens, which show nothing (nor do ids past its end). Every pushed
    token counts against `max_tokens` and in `completion_tokens`, the one that ends the text included.
    Raises OmniDraftError for an empty stop string or a budget below 1.
    """

    def __init__(
        self,
        stop_ids: Collection[int],
        stop_strings: Sequence[str],
        max_tokens: int,
        bytes_of: Sequence[bytes | None],
    ) -> None:
        if max_tokens < 1:
            raise OmniDraftError(f"max new tokens: {max_tokens} is not a budget; give at least 1")
        if "" in stop_strings:
            raise OmniDraftError("stop strings: an empty one would end every text at once; leave it out")
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_match: int | str | None = None
        self._stop_ids = frozenset(stop_ids)
        self._matchers = [_Matcher(string) for string in stop_strings]
        self._max_tokens = max_tokens
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._closed = False

    def push(self, token: int) -> str:
        """Take the next emitted token; returns the text that may be shown now, all of the rest if this ends it.

        Afterwards `finish_reason` is None (go on), "stop" (`stop_match`: the stop token's id or the stop string) or
        "length". Raises RuntimeError once finished.
        """
        if self._closed:
            raise RuntimeError("the text is finished")
        self.completion_tokens += 1
        shown = token < len(self._bytes_of) and token not in self._stop_ids
        data = self._bytes_of[token] if shown else None
        text = self._take(self._decoder.decode(data)) if data else ""
        if self.finish_reason is not None:
            return text
        if token in self._stop_ids:
            self.finish_reason, self.stop_match = "stop", token
        elif self.completion_tokens == self._max_tokens:
            self.finish_reason = "length"
        else:
            return text
        return text + self.finish()

    def finish(self) -> str:
        """End the text here, for instance when the user interrupts; returns what was held back. May be repeated."""
        if self._closed:
            return ""
        text = self._take(self._decoder.decode(b"", final=True)) + self._held
        if self._closed:  # the last, broken character completed a stop string
            return text
        self._closed, self._held = True, ""
        return text

    def _take(self, text: str) -> str:
        if not self._matchers:
            return text
        buffer = self._held + text
        for end in range(len(self._held), len(buffer)):
            found = ""
            for matcher in self._matchers:
                if matcher.step(buffer[end]) and len(matcher.string) > len(found):
                    found = matcher.string
            if found:
                self.finish_reason, self.stop_match = "stop", found
                self._closed, self._held = True, ""
                return buffer[: end + 1 - len(found)]
        split = len(buffer) - max(matcher.length for matcher in self._matchers)
        self._held = buffer[split:]
        return buffer[:split]


class _Matcher:
    """Knuth-Morris-Pratt: `length` is how much of the beginning of `string` the text ends with."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        self._shorter = [0]
        for index in range(1, len(string)):
            length = self._shorter[-1]
            while length and string[index] != string[length]:
                length = self._shorter[length - 1]
            self._shorter.append(length + (string[index] == string[length]))

    def step(self, character: str) -> bool:
        """Whether the text ends with `string` once `character` is added."""
        while self.length and self.string[self.length] != character:
            self.length = self._shorter[self.length - 1]
        self.length += self.string[self.length] == character
        return self.length == len(self.string)
