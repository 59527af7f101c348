"""The runtime's front door: open a bundle, stream text.

engine = Engine.open(Path("bundles/default"))
for chunk in engine.stream("How many legs do three cats have?"):
    print(chunk.text, end="")
print(engine.report.acceptance_rate)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.answers import Answers
from omnidraft.runtime.cache_file import CacheFile
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.chat import utf8
from omnidraft.runtime.clock import PhaseClock
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.generation import Chunk, Generation
from omnidraft.runtime.invariance import WIDEST
from omnidraft.runtime.kit import make_kit
from omnidraft.runtime.ngram_cache import NgramCache
from omnidraft.runtime.observation import Observation
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import ANYWHERE, Pair, load_pair
from omnidraft.runtime.placed import warnings
from omnidraft.runtime.placement import Wishes
from omnidraft.runtime.policy import LONGEST_DRAFT
from omnidraft.runtime.prompt import Message, as_messages
from omnidraft.runtime.proposer import Choice, Nothing, Proposer
from omnidraft.runtime.report import Report, Tally, rate
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.stop import StopMachine


class Engine:
    """A target with its drafter, ready to decode one response at a time."""

    def __init__(self, pair: Pair, options: Options, state: State, calibration: Calibration) -> None:
        """Engines with different options may share a pair, one after the other.

        `calibration`: what `calibrate` found; without W₀ or a width the text is near, not exact.
        """
        self.pair, self.options, self.calibration, self._state = pair, options, calibration, state
        exact = options.lossless == "exact" and calibration.least_rows is not None
        self._least_rows = (calibration.least_rows or 1) if exact else 1
        self._width = calibration.width if exact else None  # of every pass, where rows agree within it only
        self.lossless = "exact" if exact else "near"
        self._reuse = calibration.reuse or not exact
        self.cache: NgramCache | None = None
        self._cache_file: CacheFile | None = None
        self._proposer: Proposer = Nothing()
        if options.drafts:
            kit = make_kit(pair, options, calibration, self._least_rows, self._width, state)
            self._proposer, self.cache, self._cache_file = kit.proposer, kit.cache, kit.file
        self.report: Report | None = None
        self.tally = Tally()  # of the newest response, while it is streamed too
        self._adapter: Mapping[str, np.ndarray] | None = None
        self._head: Mapping[str, np.ndarray] | None = None
        self.observing = False
        self._answers: Answers | None = None
        self.observation: Observation | None = None

    @classmethod
    def open(
        cls,
        path: Path | str,
        target: str | None = None,
        precision: str | None = None,
        options: Options | None = None,
        state: State | None = None,
        threads: int = 0,
        warn: Callable[[str], None] = lambda line: None,
        tell: Callable[[str], None] = lambda line: None,
        wishes: Wishes = ANYWHERE,
    ) -> Engine:
        """Open a bundle's target (the first by default). `state` None keeps nothing on the device.

        What has to be known of the device is looked up in the state, or measured (some seconds; `tell` says so) and
        kept there.
        Raises OmniDraftError for a bundle, target or precision that is missing or damaged.
        """
        options = options or Options()
        state = state or State(None, warn)
        pair = load_pair(Path(path), target, precision, threads, options.drafts, wishes, state)
        for line in warnings(pair.placement):
            warn(line)
        calibration = calibrate(pair, state, options.measured, tell=tell)
        if options.lossless == "exact" and calibration.least_rows is None:
            warn(f"no width up to {WIDEST} gives equal rows on this device: the text is near, not exact")
        return cls(pair, options, state, calibration)

    def stream(
        self,
        prompt: str | Sequence[Message],
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        raw: bool = False,
        top_logprobs: int | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield the response chunk by chunk; `report` describes it afterwards, also when it was cut short.

        While `observing` is set, `observation` then has what the response teaches.

        `prompt`: a user message, or a list of {"role", "content"}; `raw`: text to continue without the chat template;
        `top_logprobs`: see `Generation`. Raises OmniDraftError for an empty prompt, or one that does not fit.
        """
        clock = PhaseClock()
        clock.enter("prefill")
        sampling = sampling or Sampling(seed=secrets.randbits(32))
        stop = [stop] if isinstance(stop, str) else stop
        ids, prefix, text = self.encode(prompt, max_new_tokens, raw)
        info, decoder = self.pair.target.info, self.pair.target.decoder
        machine = StopMachine(info.stop_ids, stop, max_new_tokens, self.pair.target.tokens.bytes_of)
        if self.pair.drafter is not None:
            self.pair.drafter.decoder.set_adapter(self._adapter)  # another engine may have used its own
        if self.pair.head is not None:
            self.pair.head.use(self._head)
        self.observation = Observation(prefix, text) if self.observing else None
        decoder.reserve(len(ids) + max_new_tokens + LONGEST_DRAFT + self._least_rows)
        generation = Generation(
            decoder,
            self._proposer,
            ids,
            sampling,
            machine,
            clock,
            least_rows=self._least_rows,
            budget=max_new_tokens,
            paper_rule=self.options.verification == "paper",
            observation=self.observation,
            top_logprobs=top_logprobs,
            reuse=self._reuse,
        )
        self.tally = generation.tally
        try:
            yield from generation.run(prefix, text)
        finally:
            generation.clock.enter("learn")
            if self._answers is not None and generation.active:
                self._remember(self._answers, generation.emitted)
            self.save()
            generation.clock.stop()
            if generation.active:
                if self._proposer.failure:
                    self._state.warn(f"the drafter failed, the target went on alone: {self._proposer.failure}")
                self.report = self._report(generation, machine, sampling)

    def use_adapter(
        self, parameters: Mapping[str, np.ndarray] | None, head: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Draft with LoRA parameters (see `Decoder.set_adapter`) from the next response on; None: as exported.

        `head`: the acceptance head's parameters that were learned with them (see `AcceptanceHead.use`).

        Raises OmniDraftError if nothing is drafted here, or if they belong to another drafter.
        """
        if self.pair.drafter is None:
            raise OmniDraftError("an adapter needs a drafter; open the engine with a draft")
        self.pair.drafter.decoder.set_adapter(parameters)
        if self.pair.head is not None:
            self.pair.head.use(head)
        self._adapter, self._head = parameters, head

    def keep_answers(self) -> None:
        """From now on look up in earlier answers of this target too, and keep what it says in the state for later.

        For those whose text may be kept: whoever learns from it.
        """
        self._answers = Answers.of(self._state, self.pair.target)
        if isinstance(self._proposer, Choice) and self._proposer.lookup is not None:
            for answer in self._answers.load():
                self._proposer.lookup.remember(answer)

    def _remember(self, answers: Answers, emitted: list[int]) -> None:
        answers.add(emitted)
        if isinstance(self._proposer, Choice) and self._proposer.lookup is not None:
            self._proposer.lookup.remember(emitted)

    def forget(self) -> None:
        """Have the next response read all of its prompt, for whoever measures how long that takes."""
        self.pair.target.decoder.rollback(0)
        if self.pair.drafter is not None:
            self.pair.drafter.decoder.rollback(0)

    def generate(self, prompt: str | Sequence[Message], **arguments: Any) -> Report:
        """The whole response at once; arguments as for `stream`."""
        for _ in self.stream(prompt, **arguments):
            pass
        assert self.report is not None
        return self.report

    @property
    def cache_path(self) -> Path | None:
        """The n-gram cache's file, None if nothing is kept."""
        return None if self._cache_file is None else self._cache_file.path

    def save(self) -> None:
        """Write n-gram cache and answers to the state; what other processes wrote is added up with ours."""
        if self._answers is not None:
            self._answers.save()
        if self._cache_file is not None and self.cache is not None:
            self._cache_file.save(self.cache)

    def encode(
        self, prompt: str | Sequence[Message], max_new_tokens: int, raw: bool = False
    ) -> tuple[list[int], list[int], bytes]:
        """Target ids; draft ids of the rendered prompt; text that the drafter reads as it stands.

        Raises OmniDraftError for a prompt that is empty, or does not fit with `max_new_tokens` behind it.

        Each model reads the prompt through its own chat template: the drafter follows the target's
        text only from where the answer begins, so the two renderings need not agree.
        """
        messages = as_messages(prompt)
        plain = "\n\n".join(message["content"] for message in messages)
        prompts = self.pair.target.prompts
        chat = not raw and prompts.template is not None
        ids = prompts.chat(messages) if chat else prompts.raw(plain)
        self._check_room(len(ids), max_new_tokens)
        if self.pair.drafter is None:
            return ids, [], b""
        draft = self.pair.drafter.prompts
        if chat and draft.template is not None:
            return ids, draft.chat(messages), b""
        return ids, draft.boundary, utf8(plain + "\n\n" if chat else plain)

    def room(self, prompt_tokens: int) -> int:
        """The most new tokens that fit behind a prompt; below 1 if none does."""
        return self.pair.target.info.context - prompt_tokens - (self._least_rows - 1)

    def _check_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise OmniDraftError("max-new-tokens must be at least 1")
        context, room = self.pair.target.info.context, self.room(prompt_tokens)
        if room < max_new_tokens:
            fix = f"set max-new-tokens to at most {room}" if room > 0 else "shorten the prompt"
            raise OmniDraftError(
                f"the prompt has {prompt_tokens} tokens and {max_new_tokens} new ones do not fit behind it: target "
                f"{self.pair.name!r} has a context of {context}; {fix}"
            )

    def _report(self, generation: Generation, machine: StopMachine, sampling: Sampling) -> Report:
        tally, emitted, seconds = generation.tally, generation.emitted, generation.clock.total
        first = generation.first_token_at
        decoding = generation.last_token_at - (first or 0.0)
        biased = self.options.verification == "paper" and sampling.temperature > 0
        used = ("target", "drafter") if isinstance(self._proposer, Choice) else ("target",)
        placement = {model: self.pair.placement[model] for model in used}
        return Report(
            text=generation.text,
            finish_reason=machine.finish_reason or "cancelled",
            prompt_tokens=generation.prompt_tokens,
            reused_tokens=generation.reused_tokens,
            completion_tokens=len(emitted),
            tokens_per_second=rate(len(emitted) - 1, decoding) if len(emitted) > 1 else None,
            acceptance_rate=rate(tally.accepted, tally.proposed),
            tokens_per_verify=rate(len(emitted), tally.passes),
            mean_draft_length=rate(tally.proposed, tally.passes - 1) if self.options.drafts else None,
            ngram_use=rate(tally.merges, tally.proposed),
            ngram_acceptance=rate(tally.merges_accepted, tally.merges),
            coverage=rate(tally.translated, tally.drawn),
            lookup_use=rate(tally.lookups, tally.proposed),
            target=self.pair.name,
            precision=self.pair.precision,
            draft=self.options.draft,
            lossless="biased" if biased else self.lossless,
            verification=self.options.verification,
            seed=sampling.seed,
            context_used=len(generation.tokens) / self.pair.target.info.context,
            time_to_first_token=first,
            seconds=seconds,
            overhead_ms=generation.overhead_ms,
            providers={model: placed.actual for model, placed in placement.items()},
            placement=placement,
            profiles={model: graph.profile for model, graph in self.pair.graphs.items() if model in used},
            decode_width=self._width,
            phases=dict(generation.clock.seconds),
            drafter_failure=self._proposer.failure,
            counts={**asdict(tally), "emitted": len(emitted), "rounds": max(0, tally.passes - 1)},
            tokens=emitted,
            predictions=generation.predictions,
        )
