"""Files that survive a crash: replaced as a whole, or appended to line by line."""

import os
from pathlib import Path

_CHUNK_BYTES = 65536


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that readers see the old or the new text, never a part of it, not even after
    a crash. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def cut_torn_line(path: Path) -> None:
    """Removes the unfinished last line that a crash has left in a file of one record a line. Reads
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
