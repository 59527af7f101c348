"""Text that a target writes: answers to prompts that are given, and to prompts that it invents itself."""

from __future__ import annotations

import codecs
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.training.log import Log
from omnidraft.tools.training.network import Network, rows_at_once
from omnidraft.tools.training.rows import Prompt, Row, append_rows, digest, drop_torn_line, read_rows
from omnidraft.tools.training.target import Target

ANSWER = 256  # most tokens of an answer
QUESTION = 96  # most tokens of an invented prompt; a longer one is dropped
WARM = 0.7  # temperature of every second answer, the others are greedy
HEAD, NUCLEUS = 64, 0.95  # what is drawn from where it is not greedy
INVENTED = "invented"  # task and id of the prompts that the target invents
FRUITLESS = 20  # batches without one new prompt before inventing is given up


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


def decode(network: Network, jobs: Sequence[Job], limit: int, stops: Iterable[int]) -> list[tuple[list[int], bool]]:
    """Continue each job by up to `limit` tokens: (tokens without the stop, whether a stop ended them)."""
    stops = frozenset(stops)
    lengths = np.array([len(job.ids) for job in jobs])
    ids = np.zeros((len(jobs), lengths.max()), np.int64)
    for row, job in zip(ids, jobs, strict=True):
        row[: len(job.ids)] = job.ids
    noise = [random.Random(job.seed) for job in jobs]
    written: list[list[int]] = [[] for _ in jobs]
    finished = [False] * len(jobs)
    network.begin(len(jobs), int(lengths.max()) + limit)
    logits = network.run(ids, lengths)[np.arange(len(jobs)), lengths - 1]
    running = list(range(len(jobs)))
    for step in range(limit):
        chosen = draw(logits, [jobs[i].temperature for i in running], [noise[i].random() for i in running])
        for i, token in zip(running, chosen, strict=True):
            if finished[i] or token in stops:
                finished[i] = True
            else:
                written[i].append(token)
        alive = [row for row, i in enumerate(running) if not finished[i]]
        if not alive or step == limit - 1:
            break
        if len(alive) <= 0.85 * len(running):  # taking rows out copies the past of the others
            network.keep(alive)
            running, chosen = [running[row] for row in alive], [chosen[row] for row in alive]
        logits = network.run(np.array(chosen, np.int64)[:, None], np.ones(len(running), np.int64))[:, -1]
    return list(zip(written, finished, strict=True))


class Writer:
    """Appends a target's answers to a JSONL file. What is in the file already is not written again."""

    def __init__(self, target: Target, network: Network, path: Path, log: Log, seed: int = 0) -> None:
        """A torn last line is cut off; lines that are no rows are reported and left."""
        self._target, self._network, self._path, self._log, self._seed = target, network, path, log, seed
        if drop_torn_line(path):
            log.note(f"{path}: dropped the last line, which had no end")
        rows, complaints = read_rows([path]) if path.is_file() else ([], [])
        for complaint in complaints:
            log.note(complaint)
        self._ids = {row.id for row in rows}
        self._prompts = {row.prompt for row in rows}
        self._tokens, self._begun = 0, time.perf_counter()

    def answer_all(self, prompts: Sequence[Prompt]) -> None:
        """Answer every prompt whose id is new, in batches of like length."""
        fresh = {p.id: p for p in prompts if p.id not in self._ids}
        encoded = [(self._target.chat(p.prompt), p) for p in fresh.values()]
        fitting = [(ids, p) for ids, p in encoded if len(ids) + ANSWER <= self._target.longest]
        if len(fitting) < len(encoded):
            self._log.note(f"{len(encoded) - len(fitting)} prompts leave no room for an answer; skipped")
        fitting.sort(key=lambda pair: (len(pair[0]), pair[1].id))
        batches = []
        while fitting:
            size = rows_at_once(self._network, len(fitting[0][0]) + 16)
            batches.append(fitting[:size])
            fitting = fitting[size:]
        random.Random(self._seed).shuffle(batches)  # a part of the text should look like the whole
        self._log.stage("answering prompts", sum(map(len, batches)))
        for batch in batches:
            self._answer(batch)

    def invent(self, count: int) -> None:
        """Let the target invent prompts and answer them, until `count` of them are in the file."""
        header = self._target.header()
        numbers = [int(i.rpartition("-")[2]) for i in self._ids if i.startswith(f"{INVENTED}-")]
        number, done, fruitless = max(numbers, default=-1) + 1, len(numbers), 0
        self._log.stage("inventing prompts", count)
        self._log.advance(done, "inventing prompts")
        while done < count and fruitless < FRUITLESS:
            size = rows_at_once(self._network, len(header) + QUESTION)
            prompts = self._questions(header, range(number, number + size))[: count - done]
            number += size
            fruitless = 0 if prompts else fruitless + 1
            if prompts:
                self._answer([(self._target.chat(p.prompt), p) for p in prompts])
            done += len(prompts)
        if done < count:
            name = self._target.source.name
            raise OmniDraftError(f"--invent {count}: {name} stopped inventing new prompts after {done}; ask for fewer")

    def _questions(self, header: list[int], numbers: range) -> list[Prompt]:
        """The new ones among the prompts of these numbers."""
        jobs = [Job(header, 1.0, digest(self._seed, INVENTED, n)) for n in numbers]
        ends = {*self._target.source.stop_ids, *self._target.tokens.special.values()}
        found = []
        for n, (ids, finished) in zip(numbers, decode(self._network, jobs, QUESTION, ends), strict=True):
            text = self._text(ids).strip()
            if finished and len(ids) >= 4 and text and text not in self._prompts:
                self._prompts.add(text)
                found.append(Prompt(f"{INVENTED}-{n}", INVENTED, text))
        return found

    def _answer(self, batch: Sequence[tuple[list[int], Prompt]]) -> None:
        jobs = []
        for ids, prompt in batch:
            seed = digest(self._seed, prompt.id)
            jobs.append(Job(ids, WARM if seed % 2 else 0.0, seed))
        rows = []
        answers = decode(self._network, jobs, ANSWER, self._target.source.stop_ids)
        for (_, prompt), job, (ids, finished) in zip(batch, jobs, answers, strict=True):
            self._tokens += len(ids)
            text = self._text(ids)
            if text:
                rows.append(Row(prompt.id, prompt.task, prompt.prompt, text, job.temperature, finished))
        append_rows(self._path, rows)
        self._ids |= {row.id for row in rows}
        speed = self._tokens / (time.perf_counter() - self._begun)
        self._log.advance(len(batch), f"{self._tokens} tokens, {speed:.0f} tokens/s")

    def _text(self, ids: Sequence[int]) -> str:
        """A last character that the limit cut in two is left out."""
        tokens = self._target.tokens
        spoken = (tokens.bytes_of[i] if i < len(tokens.bytes_of) else None for i in ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(piece or b"" for piece in spoken))
