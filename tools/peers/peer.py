"""A peer as a row of the bench: prompts go to its process as token ids, answers come back as reports."""

from __future__ import annotations

from typing import Any

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.report import Report, Tally, rate
from omnidraft.tools.measure import FOREIGN
from omnidraft.tools.peers.talk import Answer, Request, Worker


class Peer:
    """Answers as an engine does, for `measure`. Every peer reads the same token ids, so chat templates are no part."""

    def __init__(self, engine: Engine, worker: Worker, assisted: bool = False) -> None:
        """`engine`: of the target that the worker has opened; it encodes the prompts. `assisted`: whether it drafts."""
        self._engine, self._worker, self._assisted = engine, worker, assisted

    @property
    def facts(self) -> dict[str, Any]:
        """What the worker tells of itself: versions, mostly."""
        return self._worker.facts

    def encode(self, prompt: Any, max_new_tokens: int, raw: bool = False) -> Any:
        """As the engine does."""
        return self._engine.encode(prompt, max_new_tokens, raw)

    def generate(self, prompt: Any, **arguments: Any) -> Report:
        """One answer; the text is left out, the tokens are there. Raises OmniDraftError if the peer fails."""
        most, sampling = arguments["max_new_tokens"], arguments["sampling"]
        ids = self.encode(prompt, most, arguments["raw"])[0]
        return self._report(self._worker.ask(Request(ids, most, vars(sampling))), len(ids), sampling.seed)

    def forget(self) -> None:
        """Nothing to do: each answer is one of its own."""

    def close(self) -> None:
        """End its process."""
        self._worker.close()

    def _report(self, answer: Answer, prompt: int, seed: int) -> Report:
        pair, tokens = self._engine.pair, answer.tokens
        tally = Tally(passes=answer.passes, proposed=answer.proposed, accepted=answer.accepted)
        decoding = answer.seconds - answer.first_seconds
        ended = bool(tokens) and tokens[-1] in pair.target.info.stop_ids
        phases = {"prefill": answer.first_seconds, "draft": answer.drafting, "verify": decoding - answer.drafting}
        return Report(
            text="", finish_reason="stop" if ended else "length", prompt_tokens=prompt, completion_tokens=len(tokens),
            tokens_per_second=rate(len(tokens) - answer.first, decoding) if len(tokens) > answer.first else None,
            acceptance_rate=rate(tally.accepted, tally.proposed), tokens_per_verify=rate(len(tokens), tally.passes),
            mean_draft_length=rate(tally.proposed, tally.passes) if self._assisted else None, ngram_use=None,
            ngram_acceptance=None, coverage=None, lookup_use=None, target=pair.name, precision=pair.precision,
            draft="assisted" if self._assisted else "off", lossless="near", verification=FOREIGN, seed=seed,
            context_used=(prompt + len(tokens)) / pair.target.info.context, time_to_first_token=answer.first_seconds,
            seconds=answer.seconds, overhead_ms=None, providers={}, phases=phases,
            counts={**vars(tally), "emitted": len(tokens), "rounds": tally.passes}, tokens=tokens,
        )  # fmt: skip
