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
    from omnidraft.runtime.report import Report
    from omnidraft.tools.answering import Answerer


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
    profile: o.Profile = "auto",
    state: o.StateFolder = None,
    no_state: o.NoState = False,
    learn: o.Learn = "off",
    trainer: o.Trainer = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what runs where, and where the time went.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Answer one prompt."""
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.tools.answering import Answerer, Setup, check_learning, open_state

    learning = check_learning(learn, trainer, no_state, draft)
    text = sys.stdin.read() if prompt == "-" else prompt
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    options, wishes = Options(draft, lossless, verification), read_wishes(ep, strict_ep, profile)
    kept = open_state(state, no_state, learning)
    with closing(Answerer(Setup(bundle, precision, options, wishes, threads, kept, trainer), target, learning)) as it:
        engine = it.engine
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
        if engine.report is not None:
            _close(engine.report, sampling.temperature > 0, as_json, verbose)
            if verbose and engine.cache is not None and engine.cache_path is not None:
                print(f"n-gram cache: {len(engine.cache)} entries in {engine.cache_path}", file=sys.stderr)
            if not interrupted:
                _learn(it, verbose)
        if interrupted:
            raise KeyboardInterrupt


def _learn(it: Answerer, verbose: bool) -> None:
    from omnidraft.tools.report_lines import learned

    done = it.learn()
    if verbose and done is not None and it.learner is not None:
        print(learned(done, it.learner.trainer_reason), file=sys.stderr)


def _close(report: Report, sampled: bool, as_json: bool, verbose: bool) -> None:
    from omnidraft.tools.report_lines import details, summary

    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
        return
    print(flush=True)
    print(summary(report, sampled), file=sys.stderr)
    if verbose:
        for line in details(report):
            print(line, file=sys.stderr)
