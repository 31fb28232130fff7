"""Locks on bytes of a file, which are released whenever the process that holds them ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

PAUSE = 0.05  # seconds between two attempts
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class ByteLocks:
    """Record locks (POSIX) on one file; a byte is held by at most one process, also on network file systems.

    The locks belong to the process: children do not inherit them, and a process must not have two of these objects for
    the same file.

    Args:
        path: The file.
        create: Whether to create a missing file.
        needed: Whether locks are required; if False, all bytes count as free on a file system without locks.

    Raises:
        FileNotFoundError: the file, or the folder for it, does not exist.
        OSError: raised by every method if the file system has no locks.
    """

    def __init__(self, path: Path, create: bool = False, needed: bool = True) -> None:
        self.path, self._needed, self._own = path, needed, set[int]()
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)

    @property
    def removed(self) -> bool:
        """Whether the file has been deleted or replaced."""
        try:
            there, own = self.path.stat(), os.fstat(self._file)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)

    def hold(self, byte: int, patience: float = 0) -> bool:
        """Lock a byte; return False if another process has held it for ``patience`` seconds."""
        until = time.monotonic() + max(patience, 1)  # a process that tests a byte holds it for a moment
        while not self._lock(fcntl.LOCK_EX, byte, 1):
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        self._own.add(byte)
        return True

    def release(self, byte: int) -> None:
        """Release a byte that this process holds."""
        self._lock(fcntl.LOCK_UN, byte, 1)
        self._own.discard(byte)

    def held(self, byte: int, number: int = 1) -> bool:
        """Return whether another process holds one of ``number`` bytes from this one on; 0: all following bytes."""
        assert not any(own >= byte and (number == 0 or own < byte + number) for own in self._own)
        if not self._lock(fcntl.LOCK_SH, byte, number):
            return True
        self._lock(fcntl.LOCK_UN, byte, number)
        return False

    def close(self) -> None:
        """Release all bytes."""
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
