"""Reports as lines for a terminal: how an answer went, where it ran, what was learned from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnidraft.runtime.placed import Placed
from omnidraft.runtime.report import Report

if TYPE_CHECKING:
    from omnidraft.adapters.learner import Round

PROMISES = {
    "exact": "exact",
    "near": "near (text may differ from plain decoding)",
    "biased": "biased (the paper's rule, sampling)",
}


def summary(report: Report, sampled: bool) -> str:
    """The closing line: tokens, speed, acceptance, and which promise held."""
    tokens_per_verify = report.tokens_per_verify if report.drafted else None
    parts = figures(report.completion_tokens, report.tokens_per_second, report.acceptance_rate, tokens_per_verify)
    parts += [drafting(report), promise(report)]
    if sampled:
        parts.append(f"seed {report.seed}")
    if report.finish_reason == "length":
        parts.append("cut at --max-new-tokens")
    if report.finish_reason == "cancelled":
        parts.append("stopped")
    return " · ".join(parts)


def figures(
    tokens: int, tokens_per_second: float | None, acceptance_rate: float | None, tokens_per_verify: float | None
) -> list[str]:
    """The figures of one answer, or of several, that were measured, each with its name."""
    parts = [f"{tokens} tokens"]
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:.1f} tokens/s")
    if acceptance_rate is not None:
        parts.append(f"acceptance rate {acceptance_rate:.2f}")
    if tokens_per_verify is not None:
        parts.append(f"{tokens_per_verify:.2f} tokens per verify")
    return parts


def drafting(report: Report) -> str:
    """How draft lengths were decided, and what they came to."""
    if report.draft.isdecimal():
        return f"draft k = {report.draft}"
    if report.mean_draft_length is None:
        return f"draft {report.draft}"
    return f"draft {report.draft}, k = {report.mean_draft_length:.1f} on average"


def promise(report: Report) -> str:
    """What holds of the text, and on what condition."""
    held = PROMISES[report.lossless]
    return held if report.decode_width is None else f"{held} (every pass with {report.decode_width} rows)"


def where(target: str, precision: str, placement: Mapping[str, Placed]) -> str:
    """Who runs the target, and the drafter where there is one."""
    drafter = f"drafter on {_placed(placement['drafter'])}" if "drafter" in placement else "no drafter"
    return f"target {target} ({precision}) on {_placed(placement['target'])}, {drafter}"


def _placed(place: Placed) -> str:
    """Who runs a model's nodes, in which shares, and what was asked for."""
    shares = " and ".join(f"{name} ({share:.1%} of the nodes)" for name, share in place.share.items())
    return f"{shares}, asked for {place.requested}"


def details(report: Report) -> list[str]:
    """Where it ran, what it cost, phase by phase."""
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.phases.items())
    lines = [
        where(report.target, report.precision, report.placement),
        "graphs: " + ", ".join(f"{model} {profile}" for model, profile in report.profiles.items()),
        f"finished: {report.finish_reason}; {report.prompt_tokens} prompt tokens, {report.reused_tokens} of them "
        f"read before, {report.context_used:.1%} of the context used; seed {report.seed}",
        f"seconds by phase: {phases}",
    ]
    if report.time_to_first_token is not None:
        lines.append(f"time to first token {report.time_to_first_token:.3f} s")
    if report.overhead_ms is not None:
        lines.append(f"a round spends {report.overhead_ms:.2f} ms outside the models (median)")
    if report.coverage is not None and report.ngram_use is not None:
        lines.append(
            f"coverage {report.coverage:.2f}, n-gram use {report.ngram_use:.2f}"
            + (f", n-gram acceptance {report.ngram_acceptance:.2f}" if report.ngram_acceptance is not None else "")
            + (f", looked up {report.lookup_use:.2f}" if report.lookup_use else "")
        )
    return lines


def learned(done: Round, trainer: str) -> str:
    """What a round of learning took, with which trainer."""
    return f"learned for {done.seconds:.1f} s with {trainer}: loss {done.loss:.3f}"
