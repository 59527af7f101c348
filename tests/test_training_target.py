"""What a target writes and says, in batches: the same as one row at a time, and nothing is done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint

from omnidraft.export import cache
from omnidraft.export.target import MODEL, build_target
from omnidraft.runtime.decoder import Decoder
from omnidraft.tools.training import generate
from omnidraft.tools.training.generate import Job, Writer, Written, decode
from omnidraft.tools.training.network import Network, OnnxNetwork, TorchNetwork
from omnidraft.tools.training.openings import OPENINGS
from omnidraft.tools.training.rows import Prompt, Row, read_rows
from omnidraft.tools.training.target import Target, open_target
from omnidraft.tools.training.teacher import TOP, Teacher

PROMPTS = [Prompt(f"p-{n}", "task", "word " * (1 + n % 5) + str(n)) for n in range(12)]


class Notes:
    """A Log that remembers, and can fail when a batch is done."""

    def __init__(self, fail_at: int = -1) -> None:
        self.lines: list[str] = []
        self.batches, self.fail_at = 0, fail_at

    def note(self, line: str) -> None:
        self.lines.append(line)

    def stage(self, what: str, total: int) -> None: ...

    def advance(self, steps: int, what: str) -> None:
        self.batches += 1
        if self.batches == self.fail_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return open_target(str(write_checkpoint(tmp_path_factory.mktemp("target") / "llama")))


@pytest.fixture(scope="module")
def model(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setattr(cache, "cache_root", lambda: root)
        return build_target(target.source, "fp32") / MODEL


@pytest.fixture
def graph(model: Path) -> Network:
    return OnnxNetwork(model, 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "ANSWER", 12)
    monkeypatch.setattr(generate, "QUESTION", 40)


def test_both_networks_agree_on_rows_of_unequal_length(target: Target, graph: Network) -> None:
    both = (graph, TorchNetwork(target.source, "cpu"))
    rng = np.random.default_rng(0)
    lengths = np.array([9, 4, 12, 7])
    feeds = [(rng.integers(3, 380, (4, 12)), lengths)]
    feeds += [(rng.integers(3, 380, (rows, 1)), np.ones(rows, np.int64)) for rows in (4, 4, 2, 2)]
    for one in both:
        one.begin(4, 32)
    for turn, (ids, real) in enumerate(feeds):
        if turn == 3:
            for one in both:
                one.keep([1, 3])
        ours, theirs = (one.run(ids, real).clone() for one in both)
        for row, length in enumerate(real):
            assert torch.allclose(ours[row, :length], theirs[row, :length], atol=1e-4)


def test_a_batch_decodes_as_the_runtime_does(target: Target, graph: Network, model: Path) -> None:
    decoder = Decoder(model)
    jobs = [Job(target.chat(p.prompt), 0.0, 1) for p in PROMPTS]
    for job, written in zip(jobs, decode(graph, jobs, 12, [0]), strict=True):
        decoder.rollback(0)
        row, plain = decoder.run(job.ids)[-1], []
        while len(plain) < 12 and (token := int(row.argmax())) != 0:
            plain.append(token)
            row = decoder.run([token])[-1]
        assert written.ids == plain and written.finished == (len(plain) < 12)
        assert [int(top.ids[0, 0]) for top in written.tops] == [*plain, 0][:12]


def test_a_draw_follows_the_law() -> None:
    p = np.array([0.5, 0.3, 0.17, 0.03])
    logits = torch.from_numpy(np.log(p)).float().expand(4000, 4)
    uniforms = (np.arange(4000) + 0.5) / 4000
    drawn = np.bincount(generate.draw(logits, [1.0] * 4000, list(uniforms)), minlength=4) / 4000
    assert np.allclose(drawn, [*p[:3] / 0.97, 0], atol=1e-3), "the nucleus of 0.95 leaves the last one out"
    assert generate.draw(logits[:2], [0.0, 0.0], [0.9, 0.1]) == [0, 0]


def test_a_killed_generation_ends_like_one_that_was_not(
    target: Target, graph: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "most", 4)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    Writer(target, graph, whole, Notes()).answer_all(PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        Writer(target, graph, killed, Notes(fail_at=2)).answer_all(PROMPTS)
    content = killed.read_bytes()
    assert content.count(b"\n") == 8
    killed.write_bytes(content[:-5] + b"\n{broken\n" + content[:40])
    log = Notes()
    Writer(target, graph, killed, log).answer_all(PROMPTS)
    assert "no end" in log.lines[0] and [line.split(": ")[0] for line in log.lines[1:]] == [
        f"{killed}:{n}" for n in (8, 9)
    ]
    rows = {r.id: r for r in read_rows([whole])[0]}
    assert {r.id: r for r in read_rows([killed])[0]} == rows and len(rows) == 12
    assert {r.temperature for r in rows.values()} == {0.0, 0.7}
    again = Notes()
    Writer(target, graph, whole, again).answer_all(PROMPTS)
    assert again.batches == 0


def test_a_target_invents_prompts_where_its_user_would_speak(
    target: Target, graph: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.header() == target.chat("x")[: len(target.header())] == [target.tokens.special["<|user|>"]]
    path = tmp_path / "text.jsonl"
    writer = Writer(target, graph, path, Notes())
    asked: list[list[Job]] = []

    def decoded(_: Network, jobs: Any, limit: int, stops: Any) -> list[Written]:
        asked.append(list(jobs))
        texts = [target.tokens.encode(b" say %d" % (job.seed % 1000)) * (1 + limit // 40) for job in jobs]
        return [Written(ids, True, []) for ids in texts]

    monkeypatch.setattr(generate, "decode", decoded)
    writer.invent(40)
    writer.invent(40)
    rows = read_rows([path])[0]
    assert len(rows) == 40 == len({r.prompt for r in rows}) and {r.task for r in rows} == {"invented"}
    begun = [target.header() + target.tokens.encode(opening.encode()) for opening in OPENINGS]
    assert all(job.ids in begun and job.temperature == 1 for job in asked[0])
    assert len({tuple(job.ids) for job in asked[0]}) > 8
    Writer(target, graph, path, Notes()).invent(45)
    assert len({r.id for r in read_rows([path])[0]}) == 45


def test_teacher_says_what_the_target_says(target: Target, graph: Network, model: Path, tmp_path: Path) -> None:
    rows = [Row(str(n), "t", f"prompt {n}", "The boat came back " * (n + 1), 0.0, n % 2 == 0) for n in range(4)]
    Teacher(tmp_path, target, Notes()).fill(rows[:3], graph)
    teacher = Teacher(tmp_path, target, Notes())
    assert teacher.missing(rows) == rows[3:]
    decoder = Decoder(model)
    for row in rows[:3]:
        prompt, answer = target.chat(row.prompt), target.answer(row)
        decoder.rollback(0)
        logits = decoder.run(prompt + answer)[len(prompt) - 1 : -1].astype(np.float64)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        top = teacher.top(row)
        assert top.ids.shape == (len(answer), TOP)
        assert np.allclose(top.p, np.take_along_axis(p, top.ids, 1), atol=2e-3)
        assert np.allclose(np.sort(top.p, 1), np.sort(p, 1)[:, -TOP:], atol=2e-3)


def test_an_invented_prompt_that_was_cut_off_ends_with_a_sentence() -> None:
    assert generate.whole_sentences("One. Two! Three") == "One. Two!"
    assert generate.whole_sentences("1.5 and\nso on") == "1.5 and"
    assert generate.whole_sentences("no end") == ""


def test_a_damaged_teacher_file_is_computed_again(target: Target, graph: Network, tmp_path: Path) -> None:
    rows = [Row("1", "t", "prompt", "The market", 0.0, True)]
    Teacher(tmp_path, target, Notes()).fill(rows, graph)
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(file.read_bytes()[:-30])
    log = Notes()
    teacher = Teacher(tmp_path, target, log)
    assert teacher.missing(rows) == rows and "damaged" in log.lines[0]
    teacher.fill(rows, graph)
    assert Teacher(tmp_path, target, Notes()).missing(rows) == []
