"""What a learner keeps in the state folder beside its adapters, so that a kill at any moment costs little."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnidraft.adapters.layout import Floats
from omnidraft.adapters.memory import Memory
from omnidraft.adapters.samples import Sample
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.observation import TOP
from omnidraft.runtime.state import Key, Payload, State

SCHEMA, REPLAY_SCHEMA = "omnidraft-learning/1", "omnidraft-replay/1"
AVERAGE = 0.95  # share of the old average that a step leaves; Polyak averaging, over about 20 steps
CANDIDATES = "candidate"  # a folder; its one file is named by content, so that it can be written before its document


@dataclass
class Candidate:
    """An adapter that has learned more than the one in use and was not compared with it yet.

    `snapshot`: where training stands; `average`: of the weights that it went through, which is what is compared and
    used; `steps`: in the average. `rounds`: of learning since the last comparison; `positions`: learned from in all;
    `misses`: comparisons in a row that it was not better in.
    """

    snapshot: Snapshot
    average: Floats
    steps: int
    rounds: int
    positions: int
    misses: int = 0

    def follow(self, weights: Floats) -> None:
        """Take the weights after one more step into the average."""
        self.steps += 1
        keep = min(AVERAGE, self.steps / (self.steps + 2))
        self.average = keep * self.average + (1 - keep) * weights


@dataclass
class Standing:
    """Where learning stands.

    `behind`: comparisons in a row in which the drafter as shipped was better; `credit`: seconds of learning earned.
    """

    candidate: Candidate | None = None
    behind: int = 0
    rounds: int = 0
    credit: float = 0.0


class LearningFile:
    """The files of one pair: what is fresh and where learning stands, samples to replay, and the candidate."""

    def __init__(self, state: State, folder: str, key: Key, draft_size: int, target_size: int) -> None:
        self._state, self._folder, self._key = state, folder, key
        self._sizes = draft_size, target_size

    def load(self) -> tuple[Memory, Standing]:
        """As the files have it; without those that cannot be used."""
        small = self._state.load(f"{self._folder}/learning.json", SCHEMA, self._key)
        large = self._state.load(f"{self._folder}/replay.json", REPLAY_SCHEMA, self._key)
        memory, standing = Memory(), Standing()
        if large is not None:
            memory.replay, memory.anchors = (self._unpacked(large[name]) for name in ("replay", "anchors"))
        if small is not None:
            memory.fresh = self._unpacked(small["fresh"])
            responses, apart, behind, rounds = (int(small[n]) for n in ("responses", "set_apart", "behind", "rounds"))
            memory.responses, memory.set_apart = responses, max(apart, len(memory.anchors))
            standing = Standing(self._candidate(small["candidate"]), behind, rounds, small["credit"])
        return memory, standing

    def save(self, memory: Memory, standing: Standing) -> None:
        """What changes with every response, and the candidate. Another process's is replaced."""
        self._state.together(lambda: self._save(memory, standing))

    def _save(self, memory: Memory, standing: Standing) -> None:
        found = standing.candidate
        described = None if found is None else self._write_candidate(found)
        if found is not None and described is None:  # it was not saved: the last one, and its document, stay
            return
        payload = {
            "fresh": [_packed(sample) for sample in memory.fresh],
            "responses": memory.responses, "set_apart": memory.set_apart,
            "candidate": described, "behind": standing.behind, "rounds": standing.rounds,
            "credit": round(standing.credit, 3),
        }  # fmt: skip
        if self._state.update(f"{self._folder}/learning.json", SCHEMA, self._key, lambda _old: payload) is not None:
            wanted = set() if described is None else {_candidate_name(described["sha256"])}
            self._state.keep_only(f"{self._folder}/{CANDIDATES}", wanted)

    def save_replay(self, memory: Memory) -> None:
        """What changes with every round of learning."""
        payload = {name: [_packed(s) for s in getattr(memory, name)] for name in ("replay", "anchors")}
        self._state.update(f"{self._folder}/replay.json", REPLAY_SCHEMA, self._key, lambda _old: payload)

    def _write_candidate(self, candidate: Candidate) -> dict[str, Any] | None:
        snapshot = candidate.snapshot
        lora = np.concatenate([snapshot.lora, candidate.average]).astype("<f4").tobytes()
        data = lora + snapshot.optimizer
        digest = hashlib.sha256(data).hexdigest()
        path = f"{self._folder}/{CANDIDATES}/{_candidate_name(digest)}"
        there = self._state.folder is not None and (self._state.folder / path).is_file()
        if not there and self._state.write_file(path, data) is None:  # most responses change no candidate
            return None
        counts = {name: getattr(candidate, name) for name in ("steps", "rounds", "positions", "misses")}
        described = {"sha256": digest, "size": len(lora), "trainer": snapshot.trainer, **counts}
        return {**described, "trained": snapshot.steps}

    def _candidate(self, described: dict[str, Any] | None) -> Candidate | None:
        if described is None:
            return None
        path = f"{self._folder}/{CANDIDATES}/{_candidate_name(described['sha256'])}"
        data = self._state.together(lambda: self._state.read_file(path, described["sha256"]))
        size = int(described["size"])  # the schema takes 5.0 for an integer
        if data is None or size > len(data) or size % 8:
            return None
        lora, average = np.frombuffer(data[:size], "<f4").astype(np.float32).reshape(2, -1)
        snapshot = Snapshot(lora, int(described["trained"]), described["trainer"], data[size:])
        counts = (int(described[name]) for name in ("steps", "rounds", "positions", "misses"))
        return Candidate(snapshot, average, *counts)

    def _unpacked(self, rows: Sequence[Payload]) -> list[Sample]:
        found = (_unpacked(row, *self._sizes) for row in rows)
        return [sample for sample in found if sample is not None]


def _candidate_name(sha256: str) -> str:
    return f"{sha256[:12]}.bin"


def _packed(sample: Sample) -> Payload:
    arrays = {name: getattr(sample, name) for name in ("draft", "target", "top_ids", "top_p")}
    packed = {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}
    return {**packed, "begin": sample.begin}


def _unpacked(row: Payload, draft_size: int, target_size: int) -> Sample | None:
    """The sample, or None if it cannot be of this pair."""
    types = {"draft": np.int32, "target": np.int32, "top_ids": np.int32, "top_p": np.float16}
    try:
        flat = {name: np.frombuffer(base64.b64decode(row[name]), kind) for name, kind in types.items()}
        tops = {name: flat[name].reshape(-1, TOP) for name in ("top_ids", "top_p")}
    except ValueError:
        return None
    sample = Sample(flat["draft"], int(row["begin"]), flat["target"], tops["top_ids"], tops["top_p"])
    n = len(sample.target)
    good = (
        0 < sample.begin < len(sample.draft)
        and n > 0
        and len(sample.top_ids) == len(sample.top_p) == n
        and bool(np.isfinite(sample.top_p).all() and (sample.top_p >= 0).all())
        and all(
            array.min() >= 0 and array.max() < size
            for array, size in ((sample.draft, draft_size), (sample.target, target_size), (sample.top_ids, target_size))
        )
    )
    return sample if good else None
