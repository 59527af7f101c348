"""The target's likeliest tokens at every position of a text, kept on disk."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.tools.log import Log
from omnidraft.tools.training.network import Network, rows_at_once
from omnidraft.tools.training.rows import Row
from omnidraft.tools.training.target import Target

TOP = 16  # tokens kept a position, heaviest first
SHARD = 256  # rows in a file: what a kill costs


@dataclass(frozen=True)
class Top:
    """At the n tokens of an answer, or its first n: ids int32 [n, TOP], probabilities float16 [n, TOP]."""

    ids: np.ndarray
    p: np.ndarray

    def rows(self, begin: int, end: int) -> Top:
        """The Top of some of the tokens."""
        return Top(self.ids[begin:end], self.p[begin:end])


def joined(parts: Sequence[Top]) -> Top:
    """One after the other."""
    return Top(np.concatenate([part.ids for part in parts]), np.concatenate([part.p for part in parts]))


def likeliest(logits: Any) -> Top:
    """The Top of float32 logits [n, V] (torch)."""
    import torch

    values, best = torch.topk(logits, min(TOP, logits.shape[-1]))
    p = torch.exp(values - torch.logsumexp(logits, -1, keepdim=True))
    return Top(best.int().cpu().numpy(), p.half().cpu().numpy())


class Teacher:
    """A folder of .npz files, each with the Top of some rows. Rows are found by what they hold."""

    def __init__(self, folder: Path, target: Target, log: Log) -> None:
        """Read what is there; a damaged file is removed, its rows are computed again."""
        self._folder, self._target, self._log = folder, target, log
        source = target.source
        reading = (source.chat_template, source.bos, target.stop, target.longest, TOP)
        self._reading = repr((source.weights_sha256, sha256(source.tokenizer.read_bytes()).hexdigest(), reading))
        self._tops: dict[str, Top] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.npz")):
            try:
                with np.load(path) as file:
                    keys, ends, ids, p = (file[name] for name in ("keys", "ends", "ids", "p"))
            except (EOFError, ValueError, KeyError, zipfile.BadZipFile):
                log.note(f"{path}: damaged; its rows are computed again")
                path.unlink()
                continue
            for key, begin, end in zip(keys.tolist(), [0, *ends[:-1]], ends, strict=True):
                self._tops[key] = Top(ids[begin:end], p[begin:end])

    def top(self, row: Row) -> Top:
        """What the target says along an answer. Raises KeyError if `missing` names the row."""
        return self._tops[self._key(row)]

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that are not here yet, each once."""
        fresh = {self._key(row): row for row in rows}
        return [row for key, row in fresh.items() if key not in self._tops]

    def fill(self, rows: Sequence[Row], network: Network) -> None:
        """Run the target over the rows that are missing (teacher-forced: one pass over each text)."""
        wanted = self.missing(rows)
        self._log.stage("target's probabilities", len(wanted))
        for start in range(0, len(wanted), SHARD):
            self._save(self._compute(wanted[start : start + SHARD], network))

    def keep(self, rows: Sequence[Row], written: Sequence[list[int]], tops: Sequence[Top]) -> None:
        """Keep what the target found likely while it wrote rows, if the tokens it wrote are those `fill` would read."""
        made = {}
        for row, ids, top in zip(rows, written, tops, strict=True):
            read = self._target.answer(row)
            if read[: len(ids)] == ids and len(read) == len(top.ids):
                made[self._key(row)] = top
        if made:
            self._save(made)

    def _save(self, made: dict[str, Top]) -> None:
        top = joined(list(made.values()))
        path = self._folder / f"{next(iter(made))}.npz"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, keys=np.array(list(made)), ends=np.cumsum([len(t.ids) for t in made.values()]),
                     ids=top.ids, p=top.p)  # fmt: skip
        temporary.replace(path)
        self._tops |= made

    def _key(self, row: Row) -> str:
        parts = (self._reading, row.prompt, row.answer, row.finished)
        return sha256(repr(parts).encode()).hexdigest()[:32]

    def _compute(self, rows: Sequence[Row], network: Network) -> dict[str, Top]:
        texts = []
        for row in rows:
            prompt = self._target.chat(row.prompt)
            texts.append((row, len(prompt), (prompt + self._target.answer(row))[: self._target.longest]))
        texts.sort(key=lambda text: -len(text[2]))
        made: dict[str, Top] = {}
        while texts:
            size = rows_at_once(network, len(texts[0][2]))
            batch, texts = texts[:size], texts[size:]
            for (row, _, _), top in zip(
                batch, _tops([t[2] for t in batch], [t[1] for t in batch], network), strict=True
            ):
                made[self._key(row)] = top
            self._log.advance(len(batch), "target's probabilities")
        return made


def _tops(texts: Sequence[list[int]], prompts: Sequence[int], network: Network) -> list[Top]:
    """The Top of each text behind its first `prompts` tokens."""
    lengths = np.array([len(ids) for ids in texts])
    ids = np.zeros((len(texts), lengths.max()), np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    network.begin(len(texts), int(lengths.max()))
    logits = network.run(ids, lengths)
    tops = []
    for row, length, prompt in zip(logits, lengths.tolist(), prompts, strict=True):
        tops.append(likeliest(row[prompt - 1 : max(length - 1, prompt - 1)]))
    return tops
