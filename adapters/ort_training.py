"""The trainer that differentiates for itself: onnxruntime-training in a process of its own (`ort_worker`)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from omnidraft.adapters import ort_worker
from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.trainer import CLIP, Batch, Snapshot, TrainerError
from omnidraft.runtime.bundle import sha256

NAME, VERSION = "onnxruntime-training", "1.19.2"
FORMAT = 1  # of the artifacts; another number has them made anew
MANIFEST = "prepared.json"
SECONDS = 120.0  # that one answer may take; a step of a 68 M parameter drafter takes 0.3 s


class Worker:
    """The process, and its end of the conversation. Whatever goes wrong is one TrainerError."""

    def __init__(self, packages: Path, python: Path | None = None, seconds: float = SECONDS) -> None:
        """`packages`: the folder that setup-training made, for the interpreter `python` (None: this one)."""
        if not packages.is_dir():
            raise TrainerError(f"{NAME}: {packages} is missing; omnidraft setup-training makes it")
        self._seconds, self._late = seconds, False
        self._errors, self._read = tempfile.TemporaryFile(), 0  # noqa: SIM115
        # -I and -S: the worker sees no package but those of its folder, and no setting of this environment.
        command = [str(python or sys.executable), "-I", "-S", ort_worker.__file__, str(packages.resolve())]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the command, which closes its worker
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise TrainerError(f"{NAME}: {command[0]} cannot be started ({error.strerror or error})") from None

    def call(self, command: str, **arguments: Any) -> ort_worker.Message:
        """Its answer to a command. Raises TrainerError if that is an error, late, or never comes."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        if stdin.closed:
            raise TrainerError(f"{NAME}: the worker is closed")
        timer = threading.Timer(self._seconds, self._expire)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            ort_worker.send(stdin, {"command": command, **arguments})
            answer = ort_worker.receive(stdout)
        except Exception:  # a broken pipe, or bytes that are no message
            raise TrainerError(self._obituary()) from None
        finally:
            timer.cancel()
            if answer is None:  # after Ctrl-C too: the next answer would be that of this command
                self.process.kill()
        self._read = self._errors.seek(0, 2)  # what it wrote until here is not why it dies
        if "error" in answer:
            raise TrainerError(f"{NAME}: {command} failed ({answer['error']})")
        return answer

    def close(self) -> None:
        """End the process; it leaves when its standard input does."""
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what a dead process has not read
                if stream is not None:
                    stream.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()

    def _expire(self) -> None:
        self._late = True
        self.process.kill()

    def _obituary(self) -> str:
        try:
            status = self.process.wait(5.0)
        except (subprocess.TimeoutExpired, ValueError):
            status = 0
        if self._late:
            how = f"gave no answer for {self._seconds:g} s"
        else:
            how = f"died of signal {-status}" if status < 0 else f"stopped with status {status}"
        said = self._last_words()
        return f"{NAME}: the worker {how}" + (f" ({said})" if said else "")

    def _last_words(self) -> str:
        self._errors.seek(max(self._read, self._errors.seek(0, 2) - 4096))
        text = re.sub(r"\x1b\[[0-9;]*m", "", self._errors.read().decode("utf-8", "replace"))
        return (text.strip().splitlines() or [""])[-1].strip()[:300]


class OrtTrainingTrainer:
    """Runs loss.onnx of a bundle, whose gradient graph onnxruntime-training derives, and its AdamW."""

    name = NAME

    def __init__(
        self, loss: Path, layout: Layout, rank: int, packages: Path, artifacts: Path,
        python: Path | None = None, threads: int = 1, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        """Raises TrainerError if the worker cannot start.

        `packages` is the folder that setup-training made; `artifacts` a cache, which may be deleted at any time;
        `seconds` the time that one answer may take.
        """
        if not loss.is_file():
            raise TrainerError(f"{loss}: no such file; export the bundle again")
        self._layout, self._rank, self._steps = layout, rank, 0

        def start() -> Worker:
            return Worker(packages, python, seconds)

        folder = prepared(loss, rank, artifacts, start)
        self._worker = start()
        try:
            paths = {"folder": str(folder.resolve()), "weights": str(loss.parent.resolve())}
            self._worker.call("open", **paths, names=layout.names(), threads=threads)
            self.load(Snapshot(layout.initial(rank)))
        except BaseException:
            self._worker.close()
            raise

    @property
    def weights(self) -> Floats:
        """The LoRA vector after the last step that succeeded; also when the worker is dead."""
        return self._lora

    def step(self, batch: Batch, rate: float) -> float:
        """See Trainer."""
        answer = self._worker.call("step", rate=rate, **batch)
        self._lora, self._steps = answer["lora"], self._steps + 1
        return float(answer["loss"])

    def gradient(self, batch: Batch) -> Floats:
        """See Trainer."""
        gradient: Floats = self._worker.call("gradient", **batch)["gradient"]
        return gradient

    def load(self, snapshot: Snapshot) -> None:
        """See Trainer. Raises ValueError for a vector of another rank."""
        if self._layout.rank(snapshot.lora) != self._rank:
            raise ValueError(f"the vector has rank {self._layout.rank(snapshot.lora)}, not {self._rank}")
        own = snapshot.trainer == self.name
        lora, optimizer = snapshot.lora.astype(np.float32), snapshot.optimizer if own else b""
        self._worker.call("load", lora=lora, checkpoint=np.frombuffer(optimizer, np.uint8))
        self._lora, self._steps = lora, snapshot.steps if own else 0

    def snapshot(self) -> Snapshot:
        """See Trainer. `optimizer` is onnxruntime-training's checkpoint."""
        optimizer = self._worker.call("save")["checkpoint"].tobytes()
        return Snapshot(self._lora.copy(), self._steps, self.name, optimizer)

    def close(self) -> None:
        """See Trainer."""
        self._worker.close()


def prepared(loss: Path, rank: int, artifacts: Path, start: Callable[[], Worker]) -> Path:
    """The folder in `artifacts` for this graph and rank; a worker fills it where it is missing or damaged.

    It appears whole or not at all. Raises TrainerError.
    """
    key = json.dumps([FORMAT, VERSION, sha256(loss), rank, CLIP])
    folder = artifacts / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
        with FileLock(artifacts / ".lock", timeout=2 * SECONDS):
            if not _whole(folder):
                for left in artifacts.glob(".making-*"):  # by a process that was killed: we have the lock
                    shutil.rmtree(left, ignore_errors=True)
                _make(loss, rank, folder, start)
    except OSError as error:
        raise TrainerError(f"{NAME}: {artifacts} cannot be written ({error.strerror or error})") from None
    return folder


def _make(loss: Path, rank: int, folder: Path, start: Callable[[], Worker]) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as temporary:
        making = Path(temporary) / folder.name
        making.mkdir()
        with closing(start()) as worker:  # of its own, so that the one that trains needs less memory
            worker.call("prepare", loss=str(loss.resolve()), rank=rank, folder=str(making.resolve()), clip=CLIP)
        hashes = {path.name: sha256(path) for path in making.iterdir()}
        (making / MANIFEST).write_text(json.dumps(hashes), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)


def _whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False
