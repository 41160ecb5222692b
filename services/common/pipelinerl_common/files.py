"""Files that others read while they are replaced.

Files of one record a line that are appended to, and may have been cut short by a crash.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all, so that a reader never sees half a file, not even after a crash. Raises
    OSError.
    """
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


_CHUNK_BYTES = 65536


def cut_torn_line(path: Path) -> None:
    """Removes an unfinished last line, so that the next record starts on a line of its own. Reads
    only the file's end.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
