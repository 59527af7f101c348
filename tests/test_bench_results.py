"""What a bench leaves behind: a folder that is written once, whose figures are those of the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import LONG_WORDS, fails, omnidraft

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.results import ResultFolder

LESSONS = ["Name three colours.", "How many legs does a spider have?"]


def test_a_result_folder_is_whole_or_not_there_and_never_written_twice(tmp_path: Path) -> None:
    out = tmp_path / "results"
    with pytest.raises(KeyboardInterrupt), ResultFolder(out) as folder:
        (folder / "half.json").write_text("{")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with ResultFolder(out) as folder:
        (folder / "result.json").write_text("{}")
        assert not out.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "result.json"]
    with pytest.raises(OmniDraftError, match="never overwritten"):
        ResultFolder(out)
    with pytest.raises(OmniDraftError, match="cannot be made"):
        ResultFolder(out / "result.json" / "results")


def write(path: Path, prompts: dict[str, list[str]]) -> Path:
    rows = [{"task": task, "prompt": text} for task, texts in prompts.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.model
def test_bench_against_peers_keeps_everything_in_its_folder(bundle: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"cats": ["How many legs do three cats have?"], "sky": LESSONS[:1]})
    options = ["--prompts", prompts, "--n", "1", "--max-new-tokens", "8", "--draft", "2", "--precision", "int4"]
    out = tmp_path / "out"
    done = omnidraft("bench", bundle, *options, "--against", "onnxruntime,genai,llama.cpp", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "result.json", "table.md", "speed_up.png", "acceptance.png", "phases.png",
    }  # fmt: skip
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    rows = {(row["task"], row["row"]): row for row in found["rows"]}
    names = [row for task, row in rows if task == "cats"]
    assert names[:3] == ["plain, 1 row", "plain, 2 rows", "onnxruntime-genai"] and names[-1] == "k = 2"
    absent = found["absent"]["int4"]
    assert ("llama.cpp, Q4_1" in names) is ("llama.cpp" not in absent)  # skipped with a reason where it is missing
    assert all(reason in (out / "table.md").read_text() for reason in absent.values())
    assert len(found["answers"]) == 2 * len(names)
    texts = {(a["task"], a["row"]): a["tokens_sha256"] for a in found["answers"]}
    for task in ("cats", "sky"):
        assert texts[task, "plain, 1 row"] == texts[task, "onnxruntime-genai"]
        assert texts[task, "plain, 2 rows"] == texts[task, "k = 2"]
        assert rows[task, "onnxruntime-genai"]["same_text"] is None
    assert set(found["files_sha256"]) == {"bundle", "prompts"}
    assert found["peers"]["onnxruntime-genai"]["onnxruntime-genai"]
    assert "never overwritten" in fails("bench", bundle, *options, "--out", out)
    assert "leave --stop out" in fails("bench", bundle, *options, "--against", "genai", "--stop", "x")
    assert "choose from onnxruntime" in fails("bench", bundle, *options, "--against", "vllm")


@pytest.mark.model
def test_the_papers_rows_learn_each_task_from_its_own_lessons(bundle: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"quiz": [LONG_WORDS]})
    lessons = write(tmp_path / "l.jsonl", {"quiz": LESSONS, "other": ["x"]})
    options = ["--prompts", prompts, "--n", "1", "--max-new-tokens", "32", "--paper"]
    out = tmp_path / "out"
    done = omnidraft("bench", bundle, *options, "--learn-from", lessons, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "result.json").read_text())
    assert [row["row"] for row in found["rows"]] == [
        "plain, 1 row", "plain, 2 rows", "SpD_DM", "+ n-gram cache", "+ L_DM, LoRA", "+ L_DM + λ L_N, LoRA",
        "the same, rank 8", "+ adaptive, joint", "+ adaptive, interleaved", "ours: projected, cost",
    ]  # fmt: skip
    assert all(row["same_text"] == 1 for row in found["rows"][1:])
    (cache,) = found["caches"]
    assert cache["n-grams"] > 0 and cache["MB as JSON"] >= 0
    whole, ours = found["evictions"][-1], next(row for row in found["rows"] if row["row"] == "+ n-gram cache")
    assert whole["row"] == "whole cache" and whole["acceptance_rate"] == ours["acceptance_rate"]
    tables = (out / "table.md").read_text()
    assert "The paper: Llama-68M for Llama3-8B" in tables and ".42/1.70" in tables
    assert (out / "learning.png").is_file()
    assert "has none of 'quiz'" in fails("bench", bundle, *options)
    assert "leave --draft" in fails("bench", bundle, *options, "--learn-from", lessons, "--draft", "2")
