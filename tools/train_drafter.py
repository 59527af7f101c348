"""Train a small Llama-architecture drafter with a vocabulary of its own.

    python -m omnidraft.tools.train_drafter --text answers.jsonl --out DIR [--minutes 30]

Text is JSONL: `prompt` with `response` (what a target answered) or `reference` (what a data set
says). Responses are what a drafter must predict, so they are seen twice as often. The run is
resumed from DIR/checkpoint.pt when it is there; a time budget rather than a step count decides
its length, and the learning rate follows the fraction of the budget that is used.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REPEAT_RESPONSES = 2


def read_rows(paths: list[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows with a prompt and an answer, and one message per line that is not such a row."""
    rows, complaints = [], []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), 1):
            try:
                row = json.loads(line)
                answer = row.get("response") or row.get("reference")
                if not (isinstance(row["prompt"], str) and isinstance(answer, str)):
                    raise ValueError
            except (ValueError, KeyError, AttributeError):
                complaints.append(f"{path}:{number}: not an object with prompt and response; skipped")
                continue
            rows.append({**row, "answer": answer, "is_response": bool(row.get("response"))})
    return rows, complaints


def hold_out(
    rows: list[dict[str, Any]], per_task: int, seed: int = 1
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Split off the greedy responses of `per_task` prompts of each task; no prompt is on both sides."""
    order = random.Random(seed).sample(rows, len(rows))
    held: dict[str, list[dict[str, Any]]] = {}
    for row in order:
        if row["is_response"] and row.get("temperature", 0) == 0:
            bucket = held.setdefault(str(row.get("task", "text")), [])
            if len(bucket) < per_task:
                bucket.append(row)
    prompts = {row["prompt"] for bucket in held.values() for row in bucket}
    return [row for row in order if row["prompt"] not in prompts], held


def chat_text(row: dict[str, Any]) -> str:
    """One document as CHAT_TEMPLATE renders it."""
    return f"{USER}{row['prompt']}{ASSISTANT}{row['answer']}{END}"


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Byte-level BPE; digits stand alone, as in most targets, so that numbers need no splits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END, USER, ASSISTANT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def batches(documents: list[list[int]], rows: int, length: int, seed: int) -> Iterator[Any]:
    """Endless int64 [rows, length] batches of shuffled, packed documents."""
    import torch

    rng = np.random.default_rng(seed)
    while True:
        flat = np.array([t for i in rng.permutation(len(documents)) for t in documents[i]], np.int64)
        count = len(flat) // (rows * length)
        packed = flat[: count * rows * length].reshape(-1, length)[rng.permutation(count * rows)]
        for i in range(count):
            yield torch.from_numpy(packed[i * rows : (i + 1) * rows])


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Share of the draft tokens of held-out responses that the argmax predicts, teacher-forced."""
    import torch

    model.eval()
    right = total = 0
    with torch.inference_mode():
        for row in rows:
            prompt = tokenizer.encode(f"{USER}{row['prompt']}{ASSISTANT}").ids
            ids = torch.tensor([prompt + tokenizer.encode(row["answer"] + END).ids])[:, :768]
            guess = model(ids).logits.argmax(-1)[0, len(prompt) - 1 : -1]
            right += int((guess == ids[0, len(prompt) :]).sum())
            total += len(guess)
    model.train()
    return right / max(total, 1)


def optimizers(model: Any, rate: float) -> list[Any]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    import torch

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=rate * 10, weight_decay=0.05, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.05),
    ]


def save_atomic(value: Any, path: Path) -> None:
    """Write a checkpoint so that a kill leaves the old one or the new one."""
    import torch

    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    temporary.replace(path)


def save_drafter(model: Any, tokenizer: Any, out: Path, context: int) -> None:
    """A Hugging Face folder with float16 weights, which export reads like any other."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.float16).contiguous() for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embedding
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=1) + "\n", encoding="utf-8")


def train(
    text: Annotated[list[Path], typer.Option(help="JSONL files with prompt and response or reference.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoint and its log.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time, resumed parts included.")] = 30,
    vocabulary: Annotated[int, typer.Option(min=300)] = 8192,
    hidden: Annotated[int, typer.Option(min=64, help="A multiple of 64, the size of a head.")] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens in a training row.")] = 256,
    rate: Annotated[float, typer.Option(help="Peak AdamW learning rate; Muon's is ten times it.")] = 2e-3,
    context: Annotated[int, typer.Option(help="Positions the drafter accepts.")] = 2048,
    seed: int = 0,
) -> None:
    """Train a drafter on text that targets wrote."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    console = Console()
    torch.manual_seed(seed)
    torch.set_num_threads(os.cpu_count() or 1)
    rows, complaints = read_rows(text)
    for complaint in complaints:
        console.print(complaint, style="yellow")
    training, held = hold_out(rows, per_task=40)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([chat_text(r) for r in training], vocabulary)
        tokenizer.save(str(out / "tokenizer.json"))
    documents: list[list[int]] = []
    for row in training:
        ids = tokenizer.encode(chat_text(row)).ids
        documents += [ids] * (REPEAT_RESPONSES if row["is_response"] else 1)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, intermediate_size=int(hidden * 2.75) // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64,
        max_position_embeddings=context, tie_word_embeddings=True, rope_theta=10000.0,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, dtype="float16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    chain = optimizers(model, rate)
    peaks = [o.param_groups[0]["lr"] for o in chain]
    used, step = 0.0, 0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(chain, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        used, step = saved["seconds"], saved["step"]
        console.print(f"resumed at step {step}, {used / 60:.1f} of {minutes:g} minutes used")
    console.print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(training)} documents, "
        f"{sum(map(len, documents))} tokens an epoch, held out: " + ", ".join(f"{k} {len(v)}" for k, v in held.items())
    )
    log = (out / "log.jsonl").open("a", encoding="utf-8")

    def save() -> None:
        states = [o.state_dict() for o in chain]
        save_atomic({"model": model.state_dict(), "optimizers": states, "seconds": used, "step": step}, checkpoint)

    def report(loss: float) -> None:
        scores = {task: round(accuracy(model, tokenizer, group), 4) for task, group in held.items()}
        record = {"step": step, "minutes": round(used / 60, 2), "tokens": step * batch * length, "loss": round(loss, 4)}
        log.write(json.dumps({**record, "accuracy": scores}) + "\n")
        log.flush()
        console.print(f"step {step}: loss {loss:.3f}, accuracy {scores}")

    smooth, saved_at, reported_at = math.nan, used, used
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=minutes * 60, completed=int(used))
        for ids in batches(documents, batch, length, seed + step):
            begin = time.perf_counter()
            fraction = used / 60 / minutes
            if fraction >= 1:
                break
            scale = min(1.0, (step + 1) / 60) * (0.95 * 0.5 * (1 + math.cos(math.pi * fraction)) + 0.05)
            for optimizer, peak in zip(chain, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * scale
            loss = model(ids, labels=ids).loss
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in chain:
                optimizer.step()
            step += 1
            value = float(loss.detach())
            smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
            used += time.perf_counter() - begin
            speed = step * batch * length / used
            progress.update(bar, completed=used, description=f"loss {smooth:.3f}, {speed:.0f} tokens/s")
            if used - saved_at > 60:
                save()
                saved_at = used
            if used - reported_at > 240:
                report(smooth)
                reported_at = used
    report(smooth)
    save()
    save_drafter(model, tokenizer, out, context)
    console.print(f"saved {out}")


if __name__ == "__main__":
    typer.run(train)
