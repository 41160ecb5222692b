"""Keeps a checkpoint's weights while they are read, though the trainer removes the checkpoint
meanwhile.

evaluations/.step-40.pin/   hard links of the checkpoint's `model/`, or copies where the file system
has no hard links

A checkpoint's files are never written again, so a link to one is that file for as long as it
exists, and it takes no room. Whoever crashes leaves the other unharmed: the trainer knows nothing
of pins, and an evaluator removes what a dead one left.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL, checkpoint_folder, files_of
from pipelinerl_common.errors import TemporaryError


class Removed(TemporaryError):
    """The checkpoint is not there any more, or not as a whole."""


@contextmanager
def pinned(root: Path, step: int, pins: Path) -> Iterator[Path]:
    """The model of a checkpoint of the run in `root`, whole until the end of the block. One at a
    time below `pins`.

    Raises Removed.
    """
    remove_pins(pins)
    checkpoint, pin = checkpoint_folder(root, step), pins / f".step-{step}.pin"
    files = files_of(checkpoint)
    if files is None:
        raise Removed(f"{checkpoint} is not there as a whole")
    try:
        for name, size in files.items():
            if Path(name).parts[0] == MODEL:
                _pin(checkpoint / name, pin / Path(name).relative_to(MODEL), size)
        yield pin
    finally:
        shutil.rmtree(pin, ignore_errors=True)


def remove_pins(pins: Path) -> None:
    """Those that an earlier evaluator has left behind."""
    for leftover in pins.glob(".step-*.pin"):
        shutil.rmtree(leftover, ignore_errors=True)


def _pin(file: Path, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _link_or_copy(file, target)
        actual = target.stat().st_size
    except FileNotFoundError as error:
        raise Removed(f"{file} was removed while it was pinned") from error
    if actual != size:
        raise Removed(f"{file} has {actual} bytes, not {size}")


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except (
        OSError
    ):  # no hard links here: an object store's mount, another owner, another file system
        shutil.copyfile(file, target)
