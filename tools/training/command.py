"""`omnidraft train-drafter`: the stages one after the other, each of which takes up its work where it was left."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.runtime.errors import OmniDraftError

if TYPE_CHECKING:
    from omnidraft.runtime.token_bytes import TokenBytes
    from omnidraft.tools.log import Log
    from omnidraft.tools.training.loop import Plan
    from omnidraft.tools.training.network import Network
    from omnidraft.tools.training.rows import Row
    from omnidraft.tools.training.target import Target

TEXT, TOKENIZER, TEACHER, OWNER = "text.jsonl", "tokenizer.json", "teacher", "target.json"


def train_drafter(
    target: Annotated[str, typer.Option(help="Target: folder, hub id, .gguf file, or 'smollm2'.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter and all it is made of; a run there is resumed.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL with prompts that the target answers first; repeatable.")
    ] = None,
    invent: Annotated[int, typer.Option(min=0, help="How many more prompts the target invents and answers.")] = 0,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="More training text: JSONL, prompt with response or reference; repeatable."),
    ] = None,
    leave_out: Annotated[
        str | None, typer.Option(help="Regular expression; text whose prompt or answer it is found in is left out.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps; 0 prepares text and labels only.")] = 4000,
    shape: Annotated[
        str, typer.Option(help="Hidden size x layers; target:0,1,29 copies layers; qwen3:320x6 makes a small target.")
    ] = "256x4",
    vocabulary: Annotated[int, typer.Option(min=300, help="Tokens of the drafter's vocabulary.")] = 8192,
    distill: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the target's probabilities against its text; 0: text only.")
    ] = 0.5,
    rate: Annotated[float, typer.Option(min=1e-6, help="Peak AdamW learning rate; Muon's is ten times it.")] = 2e-3,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    length: Annotated[int, typer.Option(min=16, max=2048, help="Tokens of a row.")] = 512,
    patience: Annotated[
        int, typer.Option(min=1, help="Validations without a gain before the rate falls early; there are 25.")
    ] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, shuffling and draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, max=256, help="CPU threads; 0: as many as cores.")] = 0,
) -> None:
    """Train a drafter for a target: text, tokenizer, labels, weights."""
    from omnidraft.tools.log import Bar
    from omnidraft.tools.training.loop import Plan

    for module in ("torch", "transformers", "onnx", "onnxruntime_genai", "gguf", "safetensors", "matplotlib"):
        if find_spec(module) is None:
            raise OmniDraftError(
                f"train-drafter needs the package {module}; "
                "in the clone run: pip install -c constraints.txt -e '.[export,train]'"
            )
    plan = Plan(steps, batch, length, rate, distill, patience, seed)
    threads = threads or os.cpu_count() or 1
    out.mkdir(parents=True, exist_ok=True)
    order = _Order(target, out, prompts or [], invent, text or [], leave_out, shape, vocabulary, device, threads)
    with Bar() as log:
        _bind(out, order.target)
        _run(order, plan, log)


class _Order:
    """What was asked for, and the target's network, which is loaded when a stage first needs it."""

    def __init__(
        self, target: str, out: Path, prompts: list[Path], invent: int, text: list[Path], leave_out: str | None,
        shape: str, vocabulary: int, device: str, threads: int,
    ) -> None:  # fmt: skip
        from omnidraft.tools.training.model import parse_shape
        from omnidraft.tools.training.target import open_target

        try:
            self.leave_out = None if leave_out is None else re.compile(leave_out)
        except re.error as error:
            raise OmniDraftError(f"--leave-out {leave_out}: not a regular expression ({error})") from None
        self.shape, self.device, self.threads = parse_shape(shape), _device(device, threads), threads
        self.out, self.prompts, self.invent, self.text, self.vocabulary = out, prompts, invent, text, vocabulary
        self.target: Target = open_target(target)
        self._network: Network | None = None

    def network(self) -> Network:
        from omnidraft.tools.training.network import load_network

        if self._network is None:
            self._network = load_network(self.target.source, self.device, self.threads)
        return self._network

    def release(self) -> None:
        """Give the target's memory to training."""
        self._network = None


def _bind(out: Path, target: Target) -> None:
    """A folder's text and labels are one target's. Raises OmniDraftError if they are another's."""
    path = out / OWNER
    mine = {"target": target.source.name, "weights_sha256": target.source.weights_sha256}
    if not path.is_file():
        path.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")
        return
    try:
        theirs = json.loads(path.read_bytes())
        same = theirs["weights_sha256"] == mine["weights_sha256"]
    except (ValueError, KeyError, TypeError):
        raise OmniDraftError(
            f"{path}: damaged; give another --out, or remove it if the text is {mine['target']}'s"
        ) from None
    if not same:
        raise OmniDraftError(f"{out}: holds text of {theirs['target']}; give another --out for {mine['target']}")


def _device(name: str, threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    if name not in ("auto", "cpu", "cuda"):
        raise OmniDraftError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise OmniDraftError("--device cuda: torch finds no CUDA device here; use cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _run(order: _Order, plan: Plan, log: Log) -> None:
    if order.prompts or order.invent:
        _write_text(order, plan.seed, log)
    rows = _read_text(order, log)
    if order.leave_out is not None:
        before = len(rows)
        rows = [row for row in rows if not (order.leave_out.search(row.prompt) or order.leave_out.search(row.answer))]
        log.note(f"--leave-out: {before - len(rows)} of {before} rows left out")
    training, held = _split(rows)
    log.note(f"{len(training)} rows to train on; {len(held)} answers to held-out prompts to validate with")
    if plan.steps:
        _check_split(training, held)
    if plan.distill:
        from omnidraft.tools.training.teacher import Teacher

        teacher = Teacher(order.out / TEACHER, order.target, log)
        written = [row for row in training if row.temperature is not None]
        if teacher.missing(written):
            teacher.fill(written, order.network())
    else:
        teacher = None
    order.release()
    if plan.steps == 0:
        log.note(f"prepared {order.out}; give --steps to train")
        return
    import torch

    from omnidraft.runtime.vocabulary import build_map
    from omnidraft.tools.training.acceptance import Validation
    from omnidraft.tools.training.dataset import SoftLabels, build
    from omnidraft.tools.training.loop import Trainer
    from omnidraft.tools.training.model import build_model

    draft = _tokenizer(order, training)
    found = build_map(draft, order.target.tokens)
    soft = None if teacher is None else SoftLabels(teacher, order.target, draft, found)
    data = build(training, draft, soft)
    torch.manual_seed(plan.seed)
    model = build_model(order.shape, draft.size, plan.length, order.target, found)
    validation = Validation(held, order.target, draft, found)
    weights = sum(p.numel() for p in model.parameters())
    log.note(
        f"{weights / 1e6:.2f} M parameters on {order.device}, {data.epoch} tokens an epoch, "
        f"{len(data.soft_ids) / max(len(data.ids), 1):.0%} with soft labels; "
        "validation: " + ", ".join(f"{task} {count}" for task, count in validation.sizes.items())
    )
    trainer = Trainer(model, data, lambda m: validation.measure(m, order.device), plan, order.out, order.device, log)
    trainer.run()
    if not trainer.progress.history:
        raise OmniDraftError("--steps: the run has gone further already and was never validated; give more steps")
    best = trainer.progress.history[trainer.progress.best()]
    log.note(
        f"{order.out}: the drafter of step {best['step']}, the best of {len(trainer.progress.history)} validations"
    )


def _write_text(order: _Order, seed: int, log: Log) -> None:
    from omnidraft.tools.training.generate import Writer
    from omnidraft.tools.training.rows import read_prompts
    from omnidraft.tools.training.teacher import Teacher

    prompts, complaints = read_prompts(order.prompts)
    for complaint in complaints:
        log.note(complaint)
    teacher = Teacher(order.out / TEACHER, order.target, log)
    writer = Writer(order.target, order.network(), order.out / TEXT, log, seed, teacher)
    writer.answer_all(prompts)
    if order.invent:
        writer.invent(order.invent)


def _read_text(order: _Order, log: Log) -> list[Row]:
    from omnidraft.tools.training.rows import read_rows

    own = order.out / TEXT
    rows, complaints = read_rows([*([own] if own.is_file() else []), *order.text])
    for complaint in complaints:
        log.note(complaint)
    if not rows:
        raise OmniDraftError(f"{order.out}: there is no text; give --text, or --prompts or --invent to make some")
    return rows


def _split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and the greedy answers to held-out prompts."""
    from omnidraft.tools.training.rows import is_held_out

    training = [row for row in rows if not is_held_out(row.prompt)]
    return training, [row for row in rows if is_held_out(row.prompt) and row.is_greedy]


def _check_split(training: list[Row], held: list[Row]) -> None:
    from omnidraft.tools.training.rows import HELD_OUT

    if not training:
        raise OmniDraftError("every row's prompt is held out; give more text with --text, --prompts or --invent")
    if not held:
        raise OmniDraftError(
            f"none of the target's greedy answers is to a held-out prompt (one in {HELD_OUT} is); "
            "give more text with --prompts or --invent"
        )


def _tokenizer(order: _Order, rows: list[Row]) -> TokenBytes:
    from omnidraft.runtime.token_bytes import TokenBytes
    from omnidraft.tools.training.tokenizer import DIALECTS, train_tokenizer

    path = order.out / TOKENIZER
    if not path.is_file():
        texts = (text for row in rows for text in (row.prompt, row.answer))
        train_tokenizer(texts, order.vocabulary, path, DIALECTS[order.shape.family])
    tokens = TokenBytes.from_file(path)
    if tokens.size > order.vocabulary:
        raise OmniDraftError(
            f"--vocabulary {order.vocabulary}: {path} has {tokens.size} tokens; give that number, or another --out"
        )
    return tokens
