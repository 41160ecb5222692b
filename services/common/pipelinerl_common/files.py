"""Files that others read while they are replaced."""

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
