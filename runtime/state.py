"""The state folder: what the device writes, so that a crash, a full disk or a second process costs nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fastjsonschema
import platformdirs
from filelock import FileLock

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.files import Unusable, last_aside, read_regular, remove_inside, set_aside, write_whole

MARKER = "omnidraft-state.txt"
LOCK = ".lock"
FORGETTING = ".forgetting"  # there while everything is being removed, so that whoever comes next finishes it
MAX_BYTES = 64 << 20
KEPT_ASIDE = 3
LOCK_SECONDS = 10.0
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}

Payload = dict[str, Any]
Key = dict[str, str | int | float | bool | None]
T = TypeVar("T")


class NotWritable(OmniDraftError):
    """The disk of the state folder is full, or the folder must not be written."""


class _Mine(threading.local):
    lock = False  # whether this thread holds the folder's lock for several calls


def default_state_folder() -> Path:
    """Where a user's state lives by the platform's convention (XDG state on Linux)."""
    return platformdirs.user_state_path("omnidraft", appauthor=False)


class State:
    """Checksummed JSON documents, and files that they name, in one folder shared by any number of processes.

    A document is {"schema": id, "key": {...}, "checksum": SHA-256 of the canonical payload, "payload": {...}}. Its
    schema id `omnidraft-NAME/VERSION` names the file schemas/NAME.json, which describes the payload; its key says what
    it depends on. Every write is a temporary file, fsync and rename under the folder's lock, so that a reader finds
    the old or the new document, never a torn one. A document that does not check is set aside under another name,
    reported in one line, and work goes on without it.

    `folder` None keeps nothing: every load is None and every update does nothing. Raises OmniDraftError if the folder
    cannot be written (NotWritable where the disk is full or read-only), or holds something else (`forget` empties it,
    so it must be ours alone).
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.warn = warn
        self._mine = _Mine()
        if folder is not None:
            self._open(folder)

    @classmethod
    def where_possible(cls, folder: Path | None, warn: Callable[[str], None]) -> State:
        """For those who can do without: where the folder is not writable, one line says so and nothing is kept."""
        try:
            return cls(folder, warn)
        except NotWritable as error:
            warn(f"{error}; going on without it, nothing is kept")
            return cls(None, warn)

    def load(self, relative: str, schema: str, key: Key | None) -> Payload | None:
        """The payload of a document, whatever its key for None; None where there is none that can be used."""
        if self.folder is None:
            return None
        path = _inside(self.folder, relative)
        try:
            with self._lock():
                return self._usable(path, schema, key)
        except OSError as error:
            self.warn(f"{path}: not read ({_reason(error)}); going on without it")
            return None

    def update(
        self, relative: str, schema: str, key: Key, merge: Callable[[Payload | None], Payload]
    ) -> Payload | None:
        """Replace a document by `merge` of its payload (None where there is none) while no other process can.

        Returns the payload written, or None if it could not be: one line says why, and the old document stands.
        """
        if self.folder is None:
            return None
        path = _inside(self.folder, relative)
        try:
            with self._lock():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                payload = merge(self._usable(path, schema, key))
                _payload_check(schema)(payload)
                _write(path, _document(schema, key, payload))
                return payload
        except OSError as error:
            self.warn(_not_saved(path, error))
            return None

    def write_file(self, relative: str, data: bytes) -> str | None:
        """Replace a file as `update` replaces documents. A document should keep what this returns, its SHA-256.

        None if it could not be written: one line says why, and the old file stands.
        """
        if self.folder is None:
            return None
        path = _inside(self.folder, relative)
        try:
            with self._lock():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(path, data)
        except OSError as error:
            self.warn(_not_saved(path, error))
            return None
        return hashlib.sha256(data).hexdigest()

    def read_file(self, relative: str, sha256: str, otherwise: str = "going on without it") -> bytes | None:
        """The content of a file whose SHA-256 is known; None where it is missing or another.

        One line says so and closes with `otherwise`; what is there in its place is set aside. Raises OSError if it
        cannot be read for now, which says nothing about the file.
        """
        if self.folder is None:
            return None
        path = _inside(self.folder, relative)
        with self._lock():
            try:
                data = read_regular(path, MAX_BYTES)
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise Unusable("damaged", "damaged: the checksum differs")
                return data
            except FileNotFoundError:
                self.warn(f"{path}: missing; {otherwise}")
            except Unusable as why:
                self._set_aside(path, why, otherwise)
        return None

    def keep_only(self, folder: str, names: Collection[str], aside: int = KEPT_ASIDE) -> None:
        """Remove a folder's files but `names` and the last few set aside; one line says what could not be removed."""
        if self.folder is None:
            return
        path = _inside(self.folder, folder)
        try:
            with self._lock():
                spared = [*(path / name for name in names), *last_aside(path, aside)]
                for entry in path.iterdir():
                    if entry not in spared and (entry.is_symlink() or not entry.is_dir()):
                        entry.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self.warn(f"{error.filename or path}: not removed ({_reason(error)}); delete it")

    def together(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, with every other process and thread kept out between its calls of this State.

        None if the lock could not be had or `work` raised OSError; one line says why.
        """
        if self.folder is None or self._mine.lock:
            return work()
        try:
            with self._lock():
                self._mine.lock = True
                try:
                    return work()
                finally:
                    self._mine.lock = False
        except OSError as error:
            self.warn(_not_saved(Path(error.filename or self.folder), error))
            return None

    def forget(self) -> None:
        """Remove everything learned, with what was set aside. Raises OmniDraftError if something stays.

        A process that is killed here has removed nothing, or what it left goes when the folder is opened next.
        """
        if self.folder is None:
            return
        try:
            with self._lock():
                (self.folder / FORGETTING).touch()
                _forget_all(self.folder)
        except OSError as error:
            raise OmniDraftError(
                f"{error.filename or self.folder}: could not be removed ({_reason(error)}); delete {self.folder}"
            ) from None

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {entry.name for entry in folder.iterdir()}
            if names - {LOCK} and MARKER not in names:
                raise OmniDraftError(f"{folder}: holds files of something else; give --state DIR a folder of its own")
            if MARKER not in names:
                (folder / MARKER).write_text("What OmniDraft has learned on this device. Delete it at any time.\n")
            with self._lock():
                probe = folder / ".probe"
                probe.touch()
                probe.unlink()
                if (folder / FORGETTING).exists():
                    _forget_all(folder)
        except OSError as error:
            kind = NotWritable if error.errno in UNWRITABLE else OmniDraftError
            raise kind(
                f"{folder}: not writable as a state folder ({_reason(error)}); use --state DIR or --no-state"
            ) from None

    def _lock(self) -> AbstractContextManager[object]:
        """Take the folder's lock, free again when the context ends. Raises OSError if others keep it too long."""
        assert self.folder is not None
        if self._mine.lock:
            return nullcontext()
        return FileLock(self.folder / LOCK).acquire(timeout=LOCK_SECONDS, poll_interval=0.005)

    def _usable(self, path: Path, schema: str, key: Key | None) -> Payload | None:
        try:
            return read_document(path, schema, key)
        except FileNotFoundError:
            return None
        except Unusable as why:
            self._set_aside(path, why, "going on without it")
            return None

    def _set_aside(self, path: Path, why: Unusable, otherwise: str) -> None:
        aside = set_aside(path, why.label, KEPT_ASIDE)
        self.warn(f"{path}: {why}; set aside as {aside.name}, {otherwise}")


def _forget_all(folder: Path) -> None:
    remove_inside(folder, (MARKER, LOCK, FORGETTING))
    (folder / FORGETTING).unlink()


def _inside(folder: Path, relative: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", relative):
        raise ValueError(f"{relative!r} is not the name of a document")
    return folder / relative


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _not_saved(path: Path, error: OSError) -> str:
    return f"{path}: not saved ({_reason(error)}); free the disk, or use --state DIR or --no-state"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _document(schema: str, key: Key, payload: Payload) -> bytes:
    text = _canonical(payload)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    head = f'{{"schema":{json.dumps(schema)},"key":{_canonical(key)},"checksum":"{checksum}"'
    return f'{head},\n"payload":{text}}}\n'.encode()


@cache
def _payload_check(schema: str) -> Callable[[Any], Any]:
    """The check for payloads of one schema id. Raises ValueError for an id that no file here has."""
    name = re.fullmatch(r"omnidraft-([a-z0-9-]+)/[0-9]+", schema)
    file = Path(__file__).parent / "schemas" / f"{name[1] if name else ''}.json"
    if name is None or not file.is_file():
        raise ValueError(f"{schema!r} is not a schema id")
    definition = json.loads(file.read_text(encoding="utf-8"))
    if definition.pop("$id", None) != schema:
        raise ValueError(f"schemas/{name[1]}.json is not {schema}")
    check: Callable[[Any], Any] = fastjsonschema.compile(definition)
    return check


def read_document(path: Path, schema: str | None, key: Key | None) -> Payload:
    """The payload of a document, which stays as it is; None: of the schema that it names, whatever its key.

    Raises Unusable with the reason, OSError, and ValueError for a schema that no file here describes.
    """
    data = read_regular(path, MAX_BYTES)
    try:
        document = json.loads(data, parse_constant=_no_constant)
        found = document["schema"], document["key"], document["checksum"], document["payload"]
        digest = hashlib.sha256(_canonical(found[3]).encode()).hexdigest()  # refuses 1e999, which reads as infinity
    except (ValueError, RecursionError, TypeError, LookupError):
        raise Unusable("damaged", "damaged: not a JSON document of OmniDraft") from None
    found_schema, found_key, checksum, payload = found
    schema = str(found_schema) if schema is None else schema
    if found_schema != schema:
        raise Unusable("damaged", f"damaged or of another version: schema {str(found_schema)[:80]!r}, not {schema!r}")
    if not isinstance(found_key, dict) or checksum != digest:
        raise Unusable("damaged", "damaged: the checksum differs")
    key = found_key if key is None else key
    different = sorted(name for name in {*found_key, *key} if found_key.get(name) != key.get(name))
    if different:
        raise Unusable("other-key", f"made for something else ({', '.join(different)[:120]} differs)")
    try:
        _payload_check(schema)(payload)
    except fastjsonschema.JsonSchemaValueException as error:
        raise Unusable("damaged", f"damaged: {str(error)[:160]}") from None
    usable: Payload = payload
    return usable


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _write(path: Path, data: bytes) -> None:
    if len(data) > MAX_BYTES:  # it would be refused when read
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    write_whole(path, data)
