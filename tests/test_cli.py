"""The commands as a user meets them: output, one-line errors, exit status, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model
QUESTION = "How many legs do three cats have?"
LONG_WORDS = "Explain photosynthesis, chlorophyll and evapotranspiration to a botanist."


def omnidraft(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnidraft.tools.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def fails(*arguments: str | Path, status: int = 1) -> str:
    """The one line a failing command prints."""
    done = omnidraft(*arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("omnidraft: ")
    return done.stderr


def test_it_says_its_version() -> None:
    done = omnidraft("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"omnidraft {version('omnidraft')}, onnxruntime {version('onnxruntime')}\n"


def test_run_streams_text_and_closes_with_one_line(bundle: Path, tmp_path: Path) -> None:
    done = omnidraft("run", bundle, LONG_WORDS, "--max-new-tokens", "48", "--state", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in ("tokens/s", "acceptance rate", "tokens per verify", "exact"))
    assert list(tmp_path.rglob("ngram_cache.json"))


def test_run_json_has_every_promised_field(bundle: Path) -> None:
    done = omnidraft("run", bundle, QUESTION, "--max-new-tokens", "24", "--json", "--no-state", "--temperature", "0.7")
    report = json.loads(done.stdout)
    promised = (
        "text finish_reason prompt_tokens completion_tokens tokens_per_second acceptance_rate tokens_per_verify "
        "mean_draft_length lookup_use ngram_use coverage providers phases seed"
    )
    assert set(promised.split()) <= set(report)
    assert report["providers"] == {"target": "CPUExecutionProvider", "drafter": "CPUExecutionProvider"}


def test_run_says_near_where_nothing_is_promised(bundle: Path) -> None:
    done = omnidraft("run", bundle, QUESTION, "--max-new-tokens", "8", "--no-state", "--lossless", "near")
    assert "near" in done.stderr.splitlines()[-1]


def test_prompt_from_standard_input(bundle: Path) -> None:
    done = omnidraft("run", bundle, "-", "--max-new-tokens", "8", "--no-state", "--json", input=QUESTION)
    assert json.loads(done.stdout)["completion_tokens"] == 8


def test_verbose_says_what_ran_where_and_where_the_cache_is(bundle: Path, tmp_path: Path) -> None:
    done = omnidraft("run", bundle, QUESTION, "--max-new-tokens", "8", "--state", tmp_path / "s", "--verbose")
    (file,) = tmp_path.rglob("ngram_cache.json")  # also where nothing was learned yet
    assert f"entries in {file}" in done.stderr
    assert "CPUExecutionProvider" in done.stderr and "seconds by phase" in done.stderr


def test_show_needs_no_model(bundle: Path, tmp_path: Path) -> None:
    done = omnidraft("show", bundle)
    assert done.returncode == 0 and "smollm2" in done.stdout and "LoRA inputs" in done.stdout
    assert json.loads(omnidraft("show", bundle, "--json").stdout)["schema"] == "omnidraft-bundle/2"
    assert "files are as they were exported" in omnidraft("show", bundle, "--check").stdout


def test_bench_writes_rows(bundle: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "bench.json"
    file.write_text(json.dumps({"id": "1", "task": "cats", "prompt": QUESTION, "reference": None}) + "\n")
    done = omnidraft("bench", bundle, "--prompts", file, "--n", "1", "--max-new-tokens", "12", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["row"] for row in rows] == [
        "plain, 1 row", "plain, 2 rows", "k = 1", "k = 2", "k = 4", "threshold", "cost",
    ]  # fmt: skip
    wanted = (
        "task row precision n tokens_per_second speedup acceptance_rate tokens_per_verify gain ngram_use coverage "
        "time_to_first_token peak_rss phases"
    )
    assert all(set(wanted.split()) <= set(row) for row in rows)
    assert all(row["same_text"] == 1 for row in rows[1:])
    assert rows[-1]["calibration"] is not None and rows[-1]["last_gain"] is None
    few = ("--n", "1", "--max-new-tokens", "8", "--draft", "2,cost-no-look-up", "--map", "direct,full")
    done = omnidraft("bench", bundle, "--prompts", file, *few)
    assert done.returncode == 0, done.stderr
    for name in ("k = 2, direct", "k = 2, static + cache", "cost, no look-up, direct"):
        assert name in done.stdout
    assert "choose from direct" in fails("bench", bundle, "--prompts", file, "--map", "none")
    assert "--draft off" in fails("bench", bundle, "--prompts", file, "--draft", "2,off")


def test_bad_input_is_one_clear_line(bundle: Path, tmp_path: Path) -> None:
    assert "no such bundle" in fails("run", tmp_path / "none", "hi")
    assert "manifest.json" in fails("run", tmp_path, "hi")
    assert "it has smollm2" in fails("run", bundle, "hi", "--target", "gpt", "--no-state")
    assert "precision" in fails("run", bundle, "hi", "--precision", "int2", "--no-state")
    assert "prompt is empty" in fails("run", bundle, "", "--no-state")
    assert "shorten the prompt" in fails("run", bundle, "word " * 9000, "--no-state")
    assert "draft" in fails("run", bundle, "hi", "--draft", "99")
    assert "temperature" in fails("run", bundle, "hi", "--temperature", "-1")
    assert "exclude each other" in fails("run", bundle, "hi", "--no-state", "--state", tmp_path)
    assert "no-such-option" in fails("run", bundle, "hi", "--no-such-option", status=2)
    assert "cannot be read" in fails("bench", bundle, "--prompts", tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert "bad.jsonl:2" in fails("bench", bundle, "--prompts", tmp_path / "bad.jsonl")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle whose files are links, so that a test may replace one."""
    return Path(shutil.copytree(bundle, tmp_path / "copy", copy_function=os.link))


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_changed_truncated_and_missing_files_are_named(copy: Path) -> None:
    graph = copy / "targets/smollm2/cpu-int8/model.onnx"
    whole = graph.read_bytes()
    replace(graph, whole[:1000] + b"?" + whole[1001:])
    assert "changed since export" in fails("run", copy, "hi", "--no-state")
    assert "changed since export" in fails("show", copy, "--check")
    replace(graph, whole[:-10])
    assert "truncated" in fails("run", copy, "hi", "--no-state")
    graph.unlink()
    assert "model.onnx: missing" in fails("run", copy, "hi", "--no-state")
    replace(copy / "manifest.json", b"{}")
    assert "not a manifest" in fails("show", copy)


def test_a_full_disk_behind_standard_output_is_one_line(bundle: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "omnidraft.tools.cli", "run", str(bundle), QUESTION, "--no-state"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "No space left" in done.stderr


def test_state_folder_that_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert str(blocked) in fails("run", bundle, "hi", "--state", blocked)


def test_cache_of_another_tokenizer_is_set_aside(bundle: Path, tmp_path: Path) -> None:
    arguments = ("run", bundle, LONG_WORDS, "--max-new-tokens", "48", "--state", tmp_path / "s")
    omnidraft(*arguments)
    (file,) = tmp_path.rglob("ngram_cache.json")
    document = json.loads(file.read_text())
    document["key"]["draft_tokenizer"] = "0" * 64
    file.write_text(json.dumps(document))
    done = omnidraft(*arguments)
    assert done.returncode == 0
    assert "draft_tokenizer" in done.stderr
    assert len(list(tmp_path.rglob("ngram_cache.json*"))) >= 2


def test_control_c_saves_the_cache_and_prints_no_traceback(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "omnidraft.tools.cli", "run", str(bundle), LONG_WORDS]
    command += ["--max-new-tokens", "2000", "--state", str(tmp_path / "s"), "--temperature", "0.7", "--seed", "1"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell lets its background jobs ignore it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stdout is not None
    process.stdout.read(200)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begin < 20
    assert "Traceback" not in errors and "tokens/s" in errors and "interrupted" in errors
    (file,) = tmp_path.rglob("ngram_cache.json")
    assert json.loads(file.read_text())["payload"]["entries"]
