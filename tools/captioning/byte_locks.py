"""Locks on bytes of a file, which end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

PAUSE = 0.05  # seconds between two looks
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class ByteLocks:
    """Record locks (POSIX) on one file; a byte is held by at most one process, also on network file systems.

    They belong to the process: children do not inherit them, and two of these objects on one file must not be in one
    process.

    Args:
        path: The file.
        create: Whether to make it where there is none.
        needed: False: on a file system without locks, all is free.

    Raises:
        FileNotFoundError: there is no such file, or no folder for it.
        OSError: of every method: the file system has no locks.
    """

    def __init__(self, path: Path, create: bool = False, needed: bool = True) -> None:
        self.path, self._needed, self._own = path, needed, set[int]()
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)

    @property
    def removed(self) -> bool:
        """Whether the file has been deleted, or another one lies in its place."""
        try:
            there, own = self.path.stat(), os.fstat(self._file)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def hold(self, byte: int, patience: float = 0) -> bool:
        """Take a byte; False: another process has held it for ``patience`` seconds."""
        until = time.monotonic() + max(patience, 1)  # who looks at a byte has it for a moment
        while not self._lock(fcntl.LOCK_EX, byte, 1):
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        self._own.add(byte)
        return True

    def release(self, byte: int) -> None:
        """Let go a byte of one's own."""
        self._lock(fcntl.LOCK_UN, byte, 1)
        self._own.discard(byte)

    def held(self, byte: int, number: int = 1) -> bool:
        """Whether another process holds the byte, or one of ``number``; 0: one of all that follow."""
        assert not any(own >= byte and (number == 0 or own < byte + number) for own in self._own)
        if not self._lock(fcntl.LOCK_SH, byte, number):
            return True
        self._lock(fcntl.LOCK_UN, byte, number)
        return False

    def close(self) -> None:
        """Let go all bytes."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _lock(self, kind: int, byte: int, number: int) -> bool:
        try:
            fcntl.lockf(self._file, kind if kind == fcntl.LOCK_UN else kind | fcntl.LOCK_NB, number, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if self._needed or error.errno not in UNSUPPORTED:
                raise
        return True
