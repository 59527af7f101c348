"""Text that a target writes: answers to prompts that are given, and to prompts that it invents itself."""

from __future__ import annotations

import codecs
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.log import Log
from omnidraft.tools.training.network import Network, rows_at_once
from omnidraft.tools.training.openings import OPENINGS
from omnidraft.tools.training.rows import Prompt, Row, append_rows, digest, drop_torn_line, read_rows
from omnidraft.tools.training.target import Target
from omnidraft.tools.training.teacher import Teacher, Top, joined, likeliest

ANSWER = 256  # most tokens of an answer
QUESTION = 128  # most tokens of an invented prompt; a longer one ends at its last whole sentence
WARM = 0.7  # temperature of every second answer, the others are greedy
HEAD, NUCLEUS = 64, 0.95  # what is drawn from where it is not greedy
INVENTED = "invented"  # task and id of the prompts that the target invents
OPENING = 16  # most tokens of an opening
BLOCK = 2  # batches of prompts invented before they are answered
FRUITLESS = 5  # blocks without one new prompt before inventing is given up


@dataclass(frozen=True)
class Job:
    """Tokens to continue. The draws depend on `seed` alone, not on the batch."""

    ids: list[int]
    temperature: float
    seed: int


def draw(logits: Any, temperatures: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """One token a row from float32 logits [B, V] (torch), by one uniform number a row; greedy at temperature 0."""
    import torch

    values, ids = torch.topk(logits, min(HEAD, logits.shape[-1]))
    scale = torch.tensor([t or 1.0 for t in temperatures], device=values.device)
    p = torch.softmax(values.double() / scale[:, None], -1)
    before = p.cumsum(-1) - p
    p = torch.where(before < NUCLEUS, p, 0.0)
    u = torch.tensor(list(uniforms), dtype=torch.float64, device=values.device) * p.sum(-1)
    place = (p.cumsum(-1) <= u[:, None]).sum(-1).clamp(max=ids.shape[-1] - 1)
    place = torch.where(torch.tensor(list(temperatures), device=values.device) == 0, 0, place)
    chosen: list[int] = ids.gather(1, place[:, None])[:, 0].tolist()
    return chosen


@dataclass
class Written:
    """A continuation: tokens without the stop, whether a stop ended it, and what was likely at each of them."""

    ids: list[int]
    finished: bool
    tops: list[Top]


def decode(network: Network, jobs: Sequence[Job], limit: int, stops: Iterable[int]) -> list[Written]:
    """Continue each job by up to `limit` tokens."""
    stops = frozenset(stops)
    lengths = np.array([len(job.ids) for job in jobs])
    ids = np.zeros((len(jobs), lengths.max()), np.int64)
    for row, job in zip(ids, jobs, strict=True):
        row[: len(job.ids)] = job.ids
    noise = [random.Random(job.seed) for job in jobs]
    written = [Written([], False, []) for _ in jobs]
    network.begin(len(jobs), int(lengths.max()) + limit)
    logits = network.run(ids, lengths)[np.arange(len(jobs)), lengths - 1]
    running = list(range(len(jobs)))
    for step in range(limit):
        chosen = draw(logits, [jobs[i].temperature for i in running], [noise[i].random() for i in running])
        top = likeliest(logits)
        for row, (i, token) in enumerate(zip(running, chosen, strict=True)):
            if written[i].finished:
                continue
            written[i].tops.append(top.rows(row, row + 1))
            if token in stops:
                written[i].finished = True
            else:
                written[i].ids.append(token)
        alive = [row for row, i in enumerate(running) if not written[i].finished]
        if not alive or step == limit - 1:
            break
        if len(alive) <= 0.85 * len(running):  # taking rows out copies the past of the others
            network.keep(alive)
            running, chosen = [running[row] for row in alive], [chosen[row] for row in alive]
        logits = network.run(np.array(chosen, np.int64)[:, None], np.ones(len(running), np.int64))[:, -1]
    return written


def whole_sentences(text: str) -> str:
    """The text up to the end of its last sentence or line, "" if none ends."""
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)|(?=\n)", text)]
    return text[: ends[-1]] if ends else ""


class Writer:
    """Appends a target's answers to a JSONL file. What is in the file already is not written again."""

    def __init__(
        self, target: Target, network: Network, path: Path, log: Log, seed: int = 0, teacher: Teacher | None = None
    ) -> None:
        """A `teacher` keeps what the target found likely, and need not read the answers again.

        A torn last line is cut off; lines that are no rows are reported and left.
        """
        self._target, self._network, self._path, self._log, self._seed = target, network, path, log, seed
        self._teacher = teacher
        if drop_torn_line(path):
            log.note(f"{path}: dropped the last line, which had no end")
        rows, complaints = read_rows([path]) if path.is_file() else ([], [])
        for complaint in complaints:
            log.note(complaint)
        self._done = {(row.id, row.prompt) for row in rows}
        self._prompts = {row.prompt for row in rows}
        self._tokens, self._begun = 0, time.perf_counter()

    def answer_all(self, prompts: Sequence[Prompt]) -> None:
        """Answer every prompt that is new, in batches of like length."""
        fresh = {(p.id, p.prompt): p for p in prompts if (p.id, p.prompt) not in self._done}
        batches = self._batches(list(fresh.values()))
        random.Random(self._seed).shuffle(batches)  # a part of the text should look like the whole
        self._log.stage("answering prompts", sum(map(len, batches)))
        for batch in batches:
            self._answer(batch)

    def invent(self, count: int) -> None:
        """Let the target invent prompts and answer them, until `count` of them are in the file."""
        header = self._target.header()
        size = rows_at_once(self._network, len(header) + OPENING)
        numbers = [int(i.rpartition("-")[2]) for i, _ in self._done if i.startswith(f"{INVENTED}-")]
        number, done, fruitless = max(numbers, default=-1) + 1, len(numbers), 0
        self._log.stage("inventing prompts", count)
        self._log.advance(done, "inventing prompts")
        while done < count and fruitless < FRUITLESS:
            prompts: list[Prompt] = []
            for _ in range(BLOCK):  # more prompts make batches of more equal length
                prompts += self._questions(header, range(number, number + size))
                number += size
            prompts = prompts[: count - done]
            fruitless = 0 if prompts else fruitless + 1
            for batch in self._batches(prompts):
                self._answer(batch)
            done += len(prompts)
        if done < count:
            name = self._target.source.name
            raise OmniDraftError(f"--invent {count}: {name} stopped inventing new prompts after {done}; ask for fewer")

    def _batches(self, prompts: Sequence[Prompt]) -> list[list[tuple[list[int], Prompt]]]:
        """Prompts with their ids, in batches of like length; those that leave no room for an answer are left out."""
        encoded = [(self._target.chat(p.prompt), p) for p in prompts]
        fitting = [(ids, p) for ids, p in encoded if len(ids) + ANSWER <= self._target.longest]
        if len(fitting) < len(encoded):
            self._log.note(f"{len(encoded) - len(fitting)} prompts leave no room for an answer; skipped")
        fitting.sort(key=lambda pair: (-len(pair[0]), pair[1].id))
        batches = []
        while fitting:
            size = rows_at_once(self._network, len(fitting[0][0]))
            batches.append(fitting[:size])
            fitting = fitting[size:]
        return batches

    def _questions(self, header: list[int], numbers: range) -> list[Prompt]:
        """The new ones among the prompts of these numbers."""
        openings = [OPENINGS[digest(self._seed, "opening", n) % len(OPENINGS)] for n in numbers]
        begun = [header + self._target.tokens.encode(opening.encode()) for opening in openings]
        jobs = [Job(ids, 1.0, digest(self._seed, INVENTED, n)) for ids, n in zip(begun, numbers, strict=True)]
        ends = {*self._target.source.stop_ids, *self._target.tokens.special.values()}
        found = []
        written = decode(self._network, jobs, QUESTION, ends)
        for n, opening, question in zip(numbers, openings, written, strict=True):
            text = (opening + self._text(question.ids)).strip()
            text = text if question.finished else whole_sentences(text)
            if len(question.ids) >= 4 and text and text not in self._prompts:
                self._prompts.add(text)
                found.append(Prompt(f"{INVENTED}-{n}", INVENTED, text))
        return found

    def _answer(self, batch: Sequence[tuple[list[int], Prompt]]) -> None:
        jobs = []
        for ids, prompt in batch:
            seed = digest(self._seed, prompt.id)
            jobs.append(Job(ids, WARM if seed % 2 else 0.0, seed))
        rows, tops = [], []
        answers = decode(self._network, jobs, ANSWER, self._target.source.stop_ids)
        for (_, prompt), job, answer in zip(batch, jobs, answers, strict=True):
            self._tokens += len(answer.ids)
            text = self._text(answer.ids)
            if text:
                rows.append(Row(prompt.id, prompt.task, prompt.prompt, text, job.temperature, answer.finished))
                tops.append(answer)
        if self._teacher is not None:
            self._teacher.keep(rows, [answer.ids for answer in tops], [joined(answer.tops) for answer in tops])
        append_rows(self._path, rows)
        self._done |= {(row.id, row.prompt) for row in rows}
        speed = self._tokens / (time.perf_counter() - self._begun)
        self._log.advance(len(batch), f"{self._tokens} tokens, {speed:.0f} tokens/s")

    def _text(self, ids: Sequence[int]) -> str:
        """A last character that the limit cut in two is left out."""
        tokens = self._target.tokens
        spoken = (tokens.bytes_of[i] if i < len(tokens.bytes_of) else None for i in ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(piece or b"" for piece in spoken))
