"""The checkpoint that is evaluated next, and its weights for as long as they are read.

every 20 of 60 steps
evaluated: none    present: 0, 10, 20, 30, 40 -> 0, the initial weights, which nothing overtakes
evaluated: 0       present: 10, 20, 30, 40    -> 40, and 20 is overtaken
evaluated: 0, 40   present: 50, 60            -> 60, the last step, which is always due

The trainer may remove a checkpoint while it is evaluated. So its weights are pinned:

evaluations/.step-40.pin/   hard links of the checkpoint's `model/`, or copies without hard links

A checkpoint's files are never written again, so a link to one is that file for as long as it
exists, and takes no room. A crash on either side is harmless: the trainer does not know of pins,
and an evaluator removes those of its predecessor.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_common.checkpoints import MODEL, checkpoint_folder, files_of
from pipelinerl_common.errors import TemporaryError
from pipelinerl_common.settings import EvaluationSettings

START = 0
"""The step of the initial weights."""


@dataclass(frozen=True, slots=True)
class DueCheckpoint:
    """The step to evaluate next."""

    step: int
    overtaken: tuple[int, ...] = ()
    """Steps that were due since the newest evaluated one and will not be evaluated."""


def choose(
    settings: EvaluationSettings, last_step: int, there: Iterable[int], evaluated: Collection[int]
) -> DueCheckpoint | None:
    """The newest due step of the checkpoints that are `there`, which come newest first; None
    without one. `last_step` is the run's.
    """
    if settings.at_start and START not in evaluated:
        return DueCheckpoint(START)
    newest = max(evaluated, default=START)
    chosen = next(
        (step for step in there if step > newest and is_due(settings, last_step, step)), None
    )
    if chosen is None:
        return None
    first = newest - newest % settings.every_steps + settings.every_steps
    return DueCheckpoint(chosen, tuple(range(first, chosen, settings.every_steps)))


def is_due(settings: EvaluationSettings, last_step: int, step: int) -> bool:
    return step >= last_step or step % settings.every_steps == 0


def is_over(last_step: int, evaluated: Iterable[int]) -> bool:
    """Whether no further step will be due."""
    return max(evaluated, default=START) >= last_step


class CheckpointRemoved(TemporaryError):
    """The checkpoint is not present any more, or only in part."""


@contextmanager
def pinned(root: Path, step: int, pins: Path) -> Iterator[Path]:
    """The model of a checkpoint of the run in `root`, complete until the end of the block. `pins`
    holds one at a time. Raises CheckpointRemoved.
    """
    for leftover in pins.glob(".step-*.pin"):
        shutil.rmtree(leftover, ignore_errors=True)
    checkpoint, pin = checkpoint_folder(root, step), pins / f".step-{step}.pin"
    files = files_of(checkpoint)
    if files is None:
        raise CheckpointRemoved(f"{checkpoint} is not there as a whole")
    try:
        for name, size in files.items():
            if Path(name).parts[0] == MODEL:
                _pin(checkpoint / name, pin / Path(name).relative_to(MODEL), size)
        yield pin
    finally:
        shutil.rmtree(pin, ignore_errors=True)


def _pin(file: Path, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _link_or_copy(file, target)
        actual = target.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointRemoved(f"{file} was removed while it was pinned") from error
    # The trainer removes files one by one: a copy may have been cut off in the middle.
    if actual != size:
        raise CheckpointRemoved(f"{file} has {actual} bytes, not {size}")


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:
        # No hard links: an object store's mount, another owner, another file system.
        shutil.copyfile(file, target)
