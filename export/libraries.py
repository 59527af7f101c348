"""Living with libraries that print, warn and raise as they like."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what Python code inside prints, warns or draws."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sink = io.StringIO()
    with redirect_stdout(sink), redirect_stderr(sink), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
