"""A lock between processes."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, waiting until no other process does. The kernel frees it when its holder dies."""
    while True:
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                break
        file.close()  # whoever held it before has removed it: this is no longer the file that others open
    try:
        yield
    finally:
        path.unlink()
        file.close()
