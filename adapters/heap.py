"""The C library's heap: what is free there, but was not given back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back() -> None:
    """Have glibc return free memory, so that what is resident is what is held, and not what was used once.

    A step of training takes some hundred MB for a moment. Other C libraries are left to themselves.
    """
    gc.collect()
    with suppress(OSError, TypeError, AttributeError):  # Windows, macOS, musl
        ctypes.CDLL(None).malloc_trim(0)
