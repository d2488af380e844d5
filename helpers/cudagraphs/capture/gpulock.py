# SPDX-License-Identifier: Apache-2.0
"""Keeps runs of this tool on one GPU out of each other's measurements: many may prepare at once, one measures alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class GpuLock:
    """A lock for one GPU of this machine, named by its UUID; without a name it locks nothing. The kernel frees it at
    exit."""

    def __init__(self, name: str | None, folder: str | None = None):
        self._fd = None
        if name is not None:
            path = Path(folder or tempfile.gettempdir()) / f"smoke-capture-{os.getuid()}-{name}.lock"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def held(self, alone: bool) -> Iterator[None]:
        """Shared with others who prepare, or `alone`. Waits for as long as it takes."""
        if self._fd is None:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
