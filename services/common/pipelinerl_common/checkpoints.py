"""A run's checkpoints for readers: which are complete, and what is in them.

checkpoints/step-40/            complete when it has manifest.json and every file that the manifest
                                lists has its size
checkpoints/.step-60.partial/   being written; never read
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

MANIFEST = "manifest.json"
MODEL = "model"
"""Folder with the policy in Hugging Face format: of a checkpoint, and in the run itself of the
initial weights.
"""


def checkpoint_folder(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps, of the run in `root`."""
    return root / "checkpoints" / f"step-{step}"


def complete_checkpoints(root: Path, above: int = 0) -> Iterator[int]:
    """Yields the optimizer steps above `above` of the complete checkpoints of the run in `root`,
    the newest first. Each checkpoint is read when its turn comes.
    """
    names = [
        manifest.parent.name.removeprefix("step-")
        for manifest in (root / "checkpoints").glob(f"step-*/{MANIFEST}")
    ]
    steps = sorted(
        (int(name) for name in names if name.isdecimal() and int(name) > above), reverse=True
    )
    return (step for step in steps if files_of(checkpoint_folder(root, step)) is not None)


def files_of(checkpoint: Path) -> Mapping[str, int] | None:
    """Size in bytes of every file of a checkpoint by its path in it; None when one is missing or
    torn.
    """
    try:
        files: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))[
            "files"
        ]
        is_whole = all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if is_whole else None
