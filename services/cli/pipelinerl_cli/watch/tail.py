"""A file that grows by whole lines."""

import os
from pathlib import Path


class Tail:
    """Reads what was appended since the last look. A file that was replaced or cut is read from its
    beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[str], bool]:
        """New whole lines, and whether they belong to another file than the last ones did. Raises
        OSError.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            if replaced:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines(), replaced
