"""`omnidraft train-drafter` from prompts to a bundle, for a small target, and its forecast against the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import ASSISTANT, CORPUS, END, USER, write_checkpoint
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from omnidraft.export import cache, parity
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.translation import Mode
from omnidraft.tools.cli import app
from omnidraft.tools.training import generate
from omnidraft.tools.training.generate import Writer
from omnidraft.tools.training.network import load_network
from omnidraft.tools.training.rows import is_held_out, read_prompts, read_rows
from omnidraft.tools.training.target import open_target
from omnidraft.tools.training.teacher import Teacher

ANSWER = 40
STEPS = "45"
WORDS = ["boat", "total", "train", "water"]


def teach(folder: Path) -> list[str]:
    """Train a checkpoint to answer prompts about each of WORDS with a sentence of CORPUS; returns 400 such prompts."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    choices = rng.integers(0, 4, 400)
    prompts = [f"{rng.integers(100, 999)} {WORDS[choice]} {n}" for n, choice in enumerate(choices)]
    texts = [f"{USER}{prompt}{ASSISTANT}{CORPUS[choice]}{END}" for prompt, choice in zip(prompts, choices, strict=True)]
    tokenizer.enable_padding(pad_id=0, pad_token=END)
    ids = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        batch = ids[torch.arange(16) + 16 * (step % 25)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return prompts


class Quiet:
    """An export's Progress that says nothing."""

    def plan(self, steps: int) -> None: ...
    def step(self, what: str) -> None: ...
    def note(self, text: str) -> None: ...


class SilentLog:
    """A training Log that says nothing."""

    def note(self, line: str) -> None: ...
    def stage(self, what: str, total: int) -> None: ...
    def advance(self, steps: int, what: str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small target and prompts for it; the caches of conversions are here too."""
    made = tmp_path_factory.mktemp("training")
    write_checkpoint(made / "target")
    prompts = teach(made / "target")
    lines = [{"id": f"p-{n}", "task": "words", "prompt": prompt} for n, prompt in enumerate(prompts)]
    (made / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: made / "cache")
        patch.setattr(generate, "ANSWER", ANSWER)
        yield made


def train(folder: Path, out: str, *options: str, status: int = 0) -> str:
    """What the command says, on one line."""
    arguments = ["train-drafter", "--target", folder / "target", "--out", folder / out, "--threads", "1", *options]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


SMALL = (
    "--shape",
    "64x1",
    "--vocabulary",
    "330",
    "--batch",
    "8",
    "--length",
    "64",
    "--distill",
    "0.5",
    "--patience",
    "25",
)


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Path:
    """A drafter made in two calls: text and labels first, then the weights."""
    said = train(folder, "drafter", "--prompts", str(folder / "prompts.jsonl"), "--steps", "0", *SMALL)
    assert "prompts.jsonl:401: not an object with prompt; skipped" in said
    assert not (folder / "drafter" / "model.safetensors").exists()
    said = train(folder, "drafter", "--steps", STEPS, "--rate", "4e-3", *SMALL)
    assert "validation: words" in said and "best of" in said
    return folder / "drafter"


def test_the_folder_holds_a_drafter_and_its_curve(drafter: Path) -> None:
    assert (drafter / "curve.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (drafter / "log.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == int(STEPS) and records[-1]["loss"] < records[0]["loss"]
    rows = read_rows([drafter / "text.jsonl"])[0]
    assert len(rows) == 400 and any(is_held_out(row.prompt) for row in rows)


def test_a_finished_run_does_nothing_more(folder: Path, drafter: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in drafter.iterdir()}
    assert f"resumed at step {STEPS}" in train(folder, "drafter", "--steps", STEPS, "--rate", "4e-3", *SMALL)
    assert {path.name: path.stat().st_mtime_ns for path in drafter.iterdir()} == before


def test_the_forecast_is_what_the_engine_measures(folder: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "int8": parity.Threshold(0.3, np.inf)})
    out = folder / "bundle"
    export(Order(str(drafter), {"t": str(folder / "target")}, out, ("int8",), "fp32"), Quiet())
    records = [json.loads(line) for line in (drafter / "log.jsonl").read_text().splitlines()]
    best = max(records, key=lambda record: (record["acceptance"]["words"]["k1"], -record["step"]))
    held = [row for row in read_rows([drafter / "text.jsonl"])[0] if is_held_out(row.prompt) and row.is_greedy]
    for k in (1, 4):
        engine = Engine.open(out, options=Options(str(k), mode=Mode.STATIC))
        accepted = proposed = 0
        for row in held:
            report = engine.generate(row.prompt, sampling=Sampling(), max_new_tokens=ANSWER)
            assert report.text == row.answer
            accepted, proposed = accepted + report.counts["accepted"], proposed + report.counts["proposed"]
        forecast = best["acceptance"]["words"][f"k{k}"]
        assert 0.2 < forecast < 0.98, "the check is vacuous"
        assert abs(accepted / proposed - forecast) < 0.02, (accepted / proposed, forecast)


def test_what_was_likely_is_kept_while_text_is_written(folder: Path, tmp_path: Path) -> None:
    log, target = SilentLog(), open_target(str(folder / "target"))
    network = load_network(target.source, "cpu", 1)
    prompts = read_prompts([folder / "prompts.jsonl"])[0][:12]
    Writer(target, network, tmp_path / "text.jsonl", log, 0, Teacher(tmp_path / "kept", target, log)).answer_all(
        prompts
    )
    rows = read_rows([tmp_path / "text.jsonl"])[0]
    kept, read = Teacher(tmp_path / "kept", target, log), Teacher(tmp_path / "read", target, log)
    missing = kept.missing(rows)
    assert len(missing) < len(rows) / 2, "only text that is spelled anew in other tokens has to be read"
    read.fill(rows, network)
    for row in [row for row in rows if row not in missing]:
        assert np.allclose(np.sort(kept.top(row).p, 1), np.sort(read.top(row).p, 1), atol=2e-3)
        assert np.array_equal(kept.top(row).ids[:, 0], read.top(row).ids[:, 0])


def test_a_drafter_copied_from_the_target(folder: Path, drafter: Path) -> None:
    said = train(
        folder, "copied", "--text", str(drafter / "text.jsonl"), "--steps", "10", "--shape", "target:0,1",
        "--vocabulary", "330", "--batch", "4", "--length", "32", "--distill", "0",
    )  # fmt: skip
    assert "best of" in said
    config = json.loads((folder / "copied" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 2)


def test_a_small_target_of_another_architecture_shares_the_drafter(
    folder: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("--text", str(drafter / "text.jsonl"))
    said = train(
        folder, "small", *text, "--steps", "30", "--shape", "qwen3:64x2", "--vocabulary", "360", "--batch", "8",
        "--length", "64", "--rate", "4e-3", "--distill", "0",
    )  # fmt: skip
    assert "best of" in said
    assert json.loads((folder / "small" / "config.json").read_text())["model_type"] == "qwen3"
    monkeypatch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "int8": parity.Threshold(0.2, np.inf)})
    out = folder / "two"
    targets = {"first": str(folder / "target"), "second": str(folder / "small")}
    export(Order(str(drafter), targets, out, ("int8",), "int8"), Quiet())
    prompts = [row.prompt for row in read_rows([drafter / "text.jsonl"])[0][:6]]
    caches = set()
    for name in targets:
        plain = Engine.open(out, name, options=Options("off"), state=State(folder / "state", print))
        ours = Engine.open(out, name, options=Options("3"), state=State(folder / "state", print))
        reports = [ours.generate(prompt, sampling=Sampling(), max_new_tokens=24) for prompt in prompts]
        assert [report.tokens for report in reports] == [
            plain.generate(prompt, sampling=Sampling(), max_new_tokens=24).tokens for prompt in prompts
        ]
        assert sum(report.counts["accepted"] for report in reports) > 5
        assert ours.cache_path is not None
        caches.add(ours.cache_path)
    assert len(caches) == 2, "each target has a cache of its own"


def test_text_can_be_left_out(folder: Path, drafter: Path) -> None:
    text = ("--text", str(drafter / "text.jsonl"), "--steps", "0", "--distill", "0")
    said = train(folder, "left", *text, "--leave-out", "boat|water")
    rows = read_rows([drafter / "text.jsonl"])[0]
    count = sum("boat" in row.prompt + row.answer or "water" in row.prompt + row.answer for row in rows)
    assert f"--leave-out: {count} of 400 rows left out" in said and 0 < count < 400
    assert "--leave-out (: not a regular expression" in train(folder, "left", *text, "--leave-out", "(", status=1)


def test_a_folder_belongs_to_its_target(folder: Path, drafter: Path) -> None:
    write_checkpoint(folder / "other")
    arguments = ["train-drafter", "--target", folder / "other", "--out", drafter, "--steps", "0"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1 and "holds text of target; give another --out for other" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "there is no text; give --text"),
        (("--shape", "64"), "--shape 64: write 256x4"),
        (("--device", "tpu"), "--device tpu: choose auto, cpu or cuda"),
        (("--text", "none.jsonl"), "none.jsonl: cannot be read"),
        (("--prompts", "none.jsonl"), "none.jsonl: cannot be read"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], message: str, folder: Path) -> None:
    assert message in train(folder, "bad", *options, status=1)


def test_text_without_held_out_answers_is_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"prompt": f"p {n}", "reference": "r"}) + "\n" for n in range(100)))
    said = train(folder, "none", "--text", str(text), status=1)
    assert "none of the target's greedy answers is to a held-out prompt" in said


def test_another_vocabulary_than_the_folder_has_is_refused(folder: Path, drafter: Path) -> None:
    said = train(folder, "drafter", "--vocabulary", "300", status=1)
    assert "--vocabulary 300:" in said and "tokenizer.json has 330 tokens; give that number" in said
