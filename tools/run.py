"""omnidraft run: one prompt, one streamed answer, one line about how it went."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.adapters.learner import Learner
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.placement import Placed
    from omnidraft.runtime.report import Report
    from omnidraft.runtime.state import State


PROMISES = {
    "exact": "exact",
    "near": "near (text may differ from plain decoding)",
    "biased": "biased (the paper's rule, sampling)",
}


def run(
    bundle: o.BundlePath,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    target: o.Target = None,
    precision: o.Precision = None,
    draft: o.Draft = "cost",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
    max_new_tokens: o.MaxNewTokens = 256,
    stop: o.Stop = None,
    raw: o.Raw = False,
    lossless: o.Lossless = "exact",
    verification: o.Verification = "coupled",
    threads: o.Threads = 0,
    ep: o.Ep = "auto",
    strict_ep: o.StrictEp = False,
    state: o.StateFolder = None,
    no_state: o.NoState = False,
    learn: Annotated[str, typer.Option(help="on: learn from the answers, now and then. off: keep none of it.")] = "off",
    trainer: o.Trainer = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what runs where, and where the time went.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Answer one prompt."""
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.runtime.state import State, default_state_folder

    if no_state and state is not None:
        raise OmniDraftError("--state and --no-state exclude each other; give one of them")
    _check_learning(learn, trainer, no_state, draft)
    text = sys.stdin.read() if prompt == "-" else prompt
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    options = Options(draft, lossless, verification)
    wishes = read_wishes(ep, strict_ep)
    folder = None if no_state else state or default_state_folder()
    kept = State(folder, o.warn)
    engine = Engine.open(bundle, target, precision, options, kept, threads, o.warn, o.tell, wishes)
    learner = _adapter(engine, kept, learn, trainer)
    if engine.pair.target.prompts.template is None and not raw:
        o.warn(f"target {engine.pair.name!r} has no chat template: the prompt is continued as text")
    interrupted = False
    try:
        with closing(engine.stream(text, sampling, max_new_tokens, stop or (), raw)) as stream:
            for chunk in stream:
                if not as_json:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    report = engine.report
    if report is not None:
        _close(report, sampling.temperature > 0, as_json, verbose)
        if verbose and engine.cache is not None and engine.cache_path is not None:
            print(f"n-gram cache: {len(engine.cache)} entries in {engine.cache_path}", file=sys.stderr)
        if learner is not None and not interrupted:
            _learn(learner, verbose)
    if interrupted:
        raise KeyboardInterrupt


def _check_learning(learn: str, trainer: str, no_state: bool, draft: str) -> None:
    from omnidraft.runtime.errors import OmniDraftError

    if learn not in ("on", "off"):
        raise OmniDraftError(f"--learn {learn}: choose on or off")
    if learn == "off" and trainer != "auto":
        raise OmniDraftError("--trainer says how to learn; give --learn on with it")
    if learn == "on" and no_state:
        raise OmniDraftError("--learn on needs a state folder to keep what it learns; leave --no-state out")
    if learn == "on" and draft == "off":
        raise OmniDraftError("--learn on needs a drafter; leave --draft off out")


def _adapter(engine: Engine, state: State, learn: str, trainer: str) -> Learner | None:
    """Draft with the adapter that was learned for this target, if there is one; the learner, if it shall go on."""
    drafter = engine.pair.drafter
    if learn == "on":
        from omnidraft.adapters.learner import Learner
        from omnidraft.adapters.settings import Settings

        return Learner(engine, state, Settings(trainer=trainer), o.warn)
    if drafter is not None and drafter.info.lora is not None and state.folder is not None:
        from omnidraft.adapters.layout import Layout
        from omnidraft.adapters.store import AdapterStore

        layout = Layout(drafter.info.lora["projections"])
        _, snapshot = AdapterStore(state, drafter.info, engine.pair.target.info, layout).current()
        if snapshot is not None:
            engine.use_adapter(layout.parameters(snapshot.lora), snapshot.head)
    return None


def _learn(learner: Learner, verbose: bool) -> None:
    with closing(learner):
        done = learner.after_response()
    if verbose and done is not None:
        print(f"learned for {done.seconds:.1f} s with {learner.trainer_reason}: loss {done.loss:.3f}", file=sys.stderr)


def _close(report: Report, sampled: bool, as_json: bool, verbose: bool) -> None:
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
        return
    print(flush=True)
    print(summary(report, sampled), file=sys.stderr)
    if verbose:
        for line in details(report):
            print(line, file=sys.stderr)


def summary(report: Report, sampled: bool) -> str:
    """The closing line: tokens, speed, acceptance, and which promise held."""
    parts = [f"{report.completion_tokens} tokens"]
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:.1f} tokens/s")
    if report.acceptance_rate is not None:
        parts.append(f"acceptance rate {report.acceptance_rate:.2f}")
    if report.tokens_per_verify is not None and report.drafted:
        parts.append(f"{report.tokens_per_verify:.2f} tokens per verify")
    parts.append(drafting(report))
    parts.append(PROMISES[report.lossless])
    if sampled:
        parts.append(f"seed {report.seed}")
    if report.finish_reason == "length":
        parts.append("cut at --max-new-tokens")
    return " · ".join(parts)


def drafting(report: Report) -> str:
    """How draft lengths were decided, and what they came to."""
    if report.draft.isdecimal():
        return f"draft k = {report.draft}"
    if report.mean_draft_length is None:
        return f"draft {report.draft}"
    return f"draft {report.draft}, k = {report.mean_draft_length:.1f} on average"


def placed(where: Placed) -> str:
    """Who runs a model's nodes, in which shares, and what was asked for."""
    shares = " and ".join(f"{name} ({share:.1%} of the nodes)" for name, share in where.share.items())
    return f"{shares}, asked for {where.requested}"


def details(report: Report) -> list[str]:
    """Where it ran, what it cost, phase by phase."""
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.phases.items())
    lines = [
        f"target {report.target} ({report.precision}) on {placed(report.placement['target'])}"
        + (f", drafter on {placed(report.placement['drafter'])}" if "drafter" in report.placement else ", no drafter"),
        f"finished: {report.finish_reason}; {report.prompt_tokens} prompt tokens, "
        f"{report.context_used:.1%} of the context used; seed {report.seed}",
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
