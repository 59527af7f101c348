"""An archive that is whole or not there, and the same bytes for the same content."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from omnidraft.runtime.bundle import sha256
from omnidraft.runtime.errors import OmniDraftError

EPOCH = 315532800  # 1980-01-01, the first day that zip knows
MODE = 0o644
BEGINNINGS = {".tar.gz": b"\x1f\x8b", ".zip": b"PK"}
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Item:
    """One file of an archive: its path there, its content, and the row of the size table it belongs to.

    `digest`: SHA-256 where it is known already, "" where not.
    """

    path: str
    source: Path | bytes
    part: str
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.source.stat().st_size if isinstance(self.source, Path) else len(self.source)

    @property
    def sha256(self) -> str:
        """Hex digest."""
        if self.digest:
            return self.digest
        return sha256(self.source) if isinstance(self.source, Path) else hashlib.sha256(self.source).hexdigest()

    def open(self) -> IO[bytes]:
        """The content from its beginning."""
        return self.source.open("rb") if isinstance(self.source, Path) else io.BytesIO(self.source)


def check_out(out: Path) -> None:
    """Raise OmniDraftError if `out` is no archive's name, or would replace something else than an archive."""
    suffix = _suffix(out)
    if suffix is None:
        raise OmniDraftError(f"--out {out}: an archive's name ends in {' or '.join(BEGINNINGS)}")
    if not out.exists():
        return
    if out.is_file():
        with out.open("rb") as file:
            if file.read(2) == BEGINNINGS[suffix]:
                return
    raise OmniDraftError(f"{out}: is there and is no {suffix} archive; remove it, or choose another --out")


def sums(items: Sequence[Item]) -> Item:
    """The SHA-256 sums of all items, as `sha256sum -c` reads them."""
    lines = [f"{item.sha256}  {item.path}\n" for item in sorted(items, key=lambda item: item.path)]
    return Item(SUMS, "".join(lines).encode(), "notes and licences")


def write_archive(out: Path, folder: str, items: Sequence[Item]) -> None:
    """Write items under `folder`, in the order of their names, all of one time, owner and mode.

    It takes its place when it is complete; what a killed run left is replaced by the next one. Raises OSError.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    write = _write_zip if _suffix(out) == ".zip" else _write_tar
    ordered = sorted(items, key=lambda item: item.path)
    try:
        with suppress(FileNotFoundError):
            partial.unlink()
        with partial.open("xb") as file:
            write(file, folder, ordered)
        partial.replace(out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_tar(file: IO[bytes], folder: str, items: Sequence[Item]) -> None:
    packed = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=EPOCH)
    with packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for item in items:
            info = tarfile.TarInfo(f"{folder}/{item.path}")
            info.size, info.mtime, info.mode = item.size, EPOCH, MODE
            with item.open() as content:
                tar.addfile(info, content)


def _write_zip(file: IO[bytes], folder: str, items: Sequence[Item]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as packed:
        for item in items:
            info = zipfile.ZipInfo(f"{folder}/{item.path}")
            info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, item.size
            info.create_system, info.external_attr = 3, MODE << 16
            with item.open() as content, packed.open(info, "w") as entry:
                shutil.copyfileobj(content, entry, 1 << 20)


def _suffix(out: Path) -> str | None:
    return next((suffix for suffix in BEGINNINGS if out.name.endswith(suffix) and out.name != suffix), None)
