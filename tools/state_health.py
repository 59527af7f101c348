"""What is found about the state folder, which stays as it is."""

from __future__ import annotations

import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from omnidraft.tools.diagnosis import Diagnosis, megabytes


def look_at_state(diagnosis: Diagnosis, folder: Path) -> None:
    """Whether the folder is ours and can be written, whose its lock is, and whether every document checks.

    Nothing is made, moved or removed.
    """
    from omnidraft.runtime.state import LOCK, MARKER

    elsewhere = "use --state DIR or --no-state"
    try:
        names = {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:
        diagnosis.note("state", "folder", f"{folder}: not there yet, made at first use")
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        why = _not_writable(above)
        if why:
            diagnosis.problem(f"{folder}: cannot be made ({why}); {elsewhere}", stops=True)
        return
    except OSError as error:
        diagnosis.note("state", "folder", f"{folder}: cannot be read")
        diagnosis.problem(f"{folder}: not usable as a state folder ({error.strerror}); {elsewhere}", stops=True)
        return
    diagnosis.note("state", "folder", str(folder))
    if names - {LOCK} and MARKER not in names:
        diagnosis.problem(f"{folder}: holds files of something else; give --state DIR a folder of its own", stops=True)
        return
    why = _not_writable(folder)
    if why:
        diagnosis.problem(f"{folder}: not writable as a state folder ({why}); {elsewhere}", stops=True)
    elif LOCK in names and not _lock_free(folder / LOCK):
        diagnosis.problem(f"{folder}: another process holds its lock; wait until it ends, or end it")
    _look_at_documents(diagnosis, folder)


def _look_at_documents(diagnosis: Diagnosis, folder: Path) -> None:
    sizes: dict[Path, int] = {}
    for path in sorted(folder.rglob("*")):
        with suppress(OSError):  # another process has just replaced it
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                sizes[path] = status.st_size
    documents = [path for path in sizes if path.suffix == ".json"]
    total = megabytes(sum(sizes.values()))
    diagnosis.note("state", "holds", f"{total} in {len(sizes)} files, {len(documents)} of them documents")
    for path in documents:
        why = _not_usable(path)
        if why:
            diagnosis.problem(f"{path}: {why}; delete it (the next use would set it aside)")


def _not_usable(document: Path) -> str:
    from omnidraft.runtime.files import Unusable
    from omnidraft.runtime.state import read_document

    try:
        read_document(document, None, None)
    except Unusable as why:
        return str(why)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except ValueError:
        return "of a kind that this version of OmniDraft does not know"
    return ""


def _not_writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _lock_free(lock: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock).acquire(timeout=1.0, poll_interval=0.05):
            return True
    except Timeout:
        return False
