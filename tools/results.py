"""What a bench leaves behind: one document, or a folder that is written once with tables and pictures beside it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.runtime.bundle import sha256
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.invariance import processor
from omnidraft.runtime.report import Report

if TYPE_CHECKING:
    from omnidraft.tools.comparison import Findings

SCHEMA = "omnidraft-bench/1"
READ_ONLY = 0o444


def machine() -> dict[str, Any]:
    """Where figures were measured, and on which versions of what runs here."""
    packages = ("omnidraft", "onnxruntime", "numpy", "tokenizers")
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def answers(task: str, reports: Mapping[str, Sequence[Report]]) -> list[dict[str, Any]]:
    """The figures of each answer, by row and number of the prompt; equal digests are equal tokens."""
    return [
        {
            "task": task,
            "precision": report.precision,
            "row": row,
            "prompt": number,
            "prompt_tokens": report.prompt_tokens,
            "tokens": report.completion_tokens,
            "tokens_sha256": hashlib.sha256(json.dumps(report.tokens).encode()).hexdigest(),
            "finish_reason": report.finish_reason,
            "tokens_per_second": report.tokens_per_second,
            "time_to_first_token": report.time_to_first_token,
            "seconds": report.seconds,
            **{name: report.counts[name] for name in ("proposed", "accepted", "passes")},
        }
        for row, run in reports.items()
        for number, report in enumerate(run)
    ]


def document(how: Mapping[str, Any], files: Mapping[str, Path | None], findings: Findings) -> dict[str, Any]:
    """All of a bench: `how` it was run, the digests of the `files` it read, and what it found."""
    return {
        "schema": SCHEMA,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "options": {**how, "graphs": findings.graphs},
        "files_sha256": {name: sha256(path) for name, path in files.items() if path is not None},
        "peers": findings.peers,
        "absent": findings.absent,
        "rows": [row.as_dict() for row in findings.rows],
        "caches": findings.extras.caches,
        "evictions": [row.as_dict() for row in findings.extras.evictions],
        "answers": findings.answers,
    }


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """As JSON. Raises OmniDraftError if the file cannot be written."""
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OmniDraftError(f"{path}: cannot be written ({error.strerror}); give --json another file") from None


class ResultFolder:
    """A folder that takes its name once all of it is there, and that nothing is written to afterwards."""

    def __init__(self, path: Path) -> None:
        """Raises OmniDraftError if it is there already, or cannot be made: minutes of work should not end at that."""
        self._path = path
        if path.exists():
            raise OmniDraftError(f"--out {path}: is there already, and results are never overwritten; name another")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        except OSError as error:
            raise OmniDraftError(f"--out {path}: cannot be made ({error.strerror}); name another folder") from None

    def __enter__(self) -> Path:
        """Where to write."""
        return self._made

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            for file in self._made.iterdir():
                file.chmod(READ_ONLY)
            self._made.chmod(0o755)
            self._made.rename(self._path)
        else:
            shutil.rmtree(self._made, ignore_errors=True)
