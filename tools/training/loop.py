"""Training: loss, schedule, checkpoints. Everything a step does depends on the step and the weights only."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.log import Log
from omnidraft.tools.training.curve import draw_curve
from omnidraft.tools.training.dataset import Batches, Dataset
from omnidraft.tools.training.model import save_drafter

WARMUP, COOLDOWN = 60, 0.3  # steps; share of the steps in which the rate falls to zero
VALIDATIONS = 25
SAVE_SECONDS = 60
CHECKPOINT, HISTORY, CURVE = "checkpoint.pt", "log.jsonl", "curve.png"


@dataclass(frozen=True)
class Plan:
    """How to train. `distill`: weight of the soft labels where there are some; `patience`: in validations."""

    steps: int
    batch: int
    length: int
    rate: float
    distill: float
    patience: int
    seed: int


@dataclass
class Progress:
    """Where a run is. `plateau`: the step at which validation had stopped improving."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    plateau: int | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def best(self) -> int:
        """Index of the best validation; of equals, the first."""
        return max(range(len(self.history)), key=lambda i: (score(self.history[i]), -i))


def score(record: dict[str, Any]) -> float:
    """Mean of the tasks' acceptance rates at k = 1."""
    rates = [figures["k1"] for figures in record["acceptance"].values()]
    return float(sum(rates) / len(rates))


def cooldown(plan: Plan, plateau: int | None) -> tuple[int, int]:
    """(first step at which the rate falls, the end). It falls near the end, or from a plateau on."""
    planned = plan.steps - math.ceil(COOLDOWN * plan.steps)
    begin = planned if plateau is None else min(plateau, planned)
    return begin, begin + plan.steps - planned


def scale(plan: Plan, step: int, plateau: int | None) -> float:
    """Learning rate of a step as a share of the peak: a linear rise, a plain, a linear fall."""
    begin, end = cooldown(plan, plateau)
    rise = (step + 1) / max(1, min(WARMUP, plan.steps // 20))
    return min(1.0, rise, (end - step) / (end - begin))


def has_bfloat16(device: str) -> bool:
    """Whether matrices in bfloat16 are faster than in float32 there."""
    import torch

    if device == "cuda":
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def optimizers(model: Any, rate: float) -> list[Any]:
    """Muon for the layers' matrices at ten times the rate, AdamW for embeddings and norms."""
    import torch

    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "layers" in n]
    others = [p for n, p in named if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=rate * 10, weight_decay=0.05, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.05),
    ]


class Trainer:
    """One run in a folder, resumed from its checkpoint where there is one."""

    def __init__(
        self, model: Any, data: Dataset, validate: Callable[[Any], dict[str, dict[str, float]]],
        plan: Plan, out: Path, device: str, log: Log,
    ) -> None:  # fmt: skip
        """Raises OmniDraftError if the checkpoint is of another shape or damaged."""
        self._model, self._validate, self._plan = model.to(device), validate, plan
        self._out, self._device, self._log = out, device, log
        self._data, self._batches = data, Batches(data, plan.batch, plan.length, plan.seed)
        self._chain = optimizers(model, plan.rate)
        self.progress = Progress()
        if (out / CHECKPOINT).is_file():
            self._load()

    def run(self) -> None:
        """Train to the end of the plan, or to the end of the cooldown that a plateau begins."""
        plan, progress = self._plan, self.progress
        every, saved = max(1, plan.steps // VALIDATIONS), time.perf_counter()
        self._log.stage("training", cooldown(plan, progress.plateau)[1])
        self._log.advance(progress.step, "training")
        while progress.step < cooldown(plan, progress.plateau)[1]:
            begun = time.perf_counter()
            loss = self._step()
            progress.step += 1
            progress.tokens += plan.batch * plan.length
            progress.loss = loss if math.isnan(progress.loss) else 0.95 * progress.loss + 0.05 * loss
            progress.seconds += time.perf_counter() - begun
            end = cooldown(plan, progress.plateau)[1]
            speed = progress.tokens / progress.seconds
            self._log.advance(1, f"loss {progress.loss:.3f}, {speed:.0f} tokens/s")
            if progress.step % every == 0 or progress.step == end:
                self._record()
                self._save()
                saved = time.perf_counter()
            elif time.perf_counter() - saved > SAVE_SECONDS:
                self._save()
                saved = time.perf_counter()

    def _step(self) -> float:
        import torch

        from omnidraft.tools.training.loss import distillation_loss

        plan, progress, data = self._plan, self.progress, self._data
        share = scale(plan, progress.step, progress.plateau)
        for optimizer, factor in zip(self._chain, (10, 1), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * factor * share
        numbers, soft = self._batches.at(progress.step)
        ids = torch.from_numpy(numbers).to(self._device, torch.int64)
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-1)  # nothing follows the last token of a row
        wanted = torch.nn.functional.pad(torch.from_numpy(soft[:, 1:]), (0, 1), value=-1).reshape(-1)
        used, rows = torch.unique(wanted, return_inverse=True)
        table = used.clamp(min=0).numpy()
        if len(data.soft_ids):
            soft_ids = torch.from_numpy(data.soft_ids[table]).to(self._device, torch.int64)
            soft_p = torch.from_numpy(data.soft_p[table]).to(self._device, torch.float32)
        else:
            soft_ids = soft_p = None
        rows = torch.where(wanted < 0, -1, rows).to(self._device)
        with torch.autocast(self._device, torch.bfloat16, enabled=has_bfloat16(self._device)):
            logits = self._model(ids).logits
        loss = distillation_loss(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), rows, soft_ids, soft_p, plan.distill
        )
        self._model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._chain:
            optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise OmniDraftError(f"--rate {plan.rate:g}: the loss is {value} at step {progress.step}; use a lower rate")
        return value

    def _record(self) -> None:
        plan, progress = self._plan, self.progress
        acceptance = self._validate(self._model)
        progress.history.append(
            {
                "step": progress.step, "tokens": progress.tokens,
                "minutes": round(progress.seconds / 60, 2), "loss": round(progress.loss, 4), "acceptance": acceptance,
            }
        )  # fmt: skip
        best = progress.best()
        if best == len(progress.history) - 1:
            save_drafter(self._model, self._out)
        elif progress.plateau is None and len(progress.history) - 1 - best >= plan.patience:
            progress.plateau = progress.step
        lines = "".join(json.dumps(record) + "\n" for record in progress.history)
        (self._out / HISTORY).write_text(lines, encoding="utf-8")
        draw_curve(progress.history, self._out / CURVE)
        shown = ", ".join(f"{task} {figures['k1']:.3f} ({figures['k4']:.3f})" for task, figures in acceptance.items())
        self._log.note(f"step {progress.step}: loss {progress.loss:.3f}, acceptance at k = 1 (4): {shown}")

    def _save(self) -> None:
        """A kill leaves the old checkpoint or the new one."""
        import torch

        state = {
            "model": self._model.state_dict(), "optimizers": [o.state_dict() for o in self._chain],
            "progress": vars(self.progress), "data": self._data.fingerprint,
        }  # fmt: skip
        temporary = self._out / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self._out / CHECKPOINT)

    def _load(self) -> None:
        import torch

        path = self._out / CHECKPOINT
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            self.progress = Progress(**state["progress"])
            self._model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._chain, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except Exception as error:  # torch raises many types for a file or a shape that it cannot take
            raise OmniDraftError(
                f"{path}: does not fit ({str(error).splitlines()[0][:120]}); give the --shape it was made with, "
                "or remove it to begin anew"
            ) from None
        if state["data"] != self._data.fingerprint:
            self._log.note("the text is not what the checkpoint was trained on; going on with the new text")
        self._log.note(f"resumed at step {self.progress.step}")
