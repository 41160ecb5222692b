"""Checkpoints as folders: complete or absent, newest first, the oldest removed. Knows nothing of
what is in them.

checkpoints/step-40/            complete: its manifest.json lists every file with its size, and they
are all there checkpoints/.step-60.partial/   being written, or left behind by a process that died;
never read
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_common.checkpoints import MANIFEST
from pipelinerl_trainer.export import save_json, sync, writing

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of the state after `step` optimizer steps. `facts` is what its writer
    noted down.
    """

    folder: Path
    step: int
    facts: Mapping[str, Any]


class CheckpointStore:
    """The folder of one run. Writing methods are for rank 0 and raise WriteFailed."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The newest complete one; incomplete ones are passed over with a warning."""
        for step in sorted(self._steps(), reverse=True):
            folder = self.path(step)
            try:
                return Checkpoint(folder, step, _read_manifest(folder, step))
            except ValueError as error:
                log.warning("checkpoint %s is not complete and is passed over: %s", folder, error)
        return None

    def begin(self, step: int) -> Path:
        """An empty folder to write to. What a process that died had begun is removed first: the
        disk may not hold both.
        """
        partial = self.partial(step)
        for leftover in self.folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        with writing():
            partial.mkdir(parents=True)
        return partial

    def partial(self, step: int) -> Path:
        """The folder that rank 0 began, for the other ranks to write to."""
        return self.folder / f".step-{step}.partial"

    def finish(self, step: int, facts: Mapping[str, Any]) -> None:
        """Every file is written: makes them durable and the checkpoint visible, then removes the
        oldest.
        """
        partial, final = self.partial(step), self.path(step)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sync([*files, *(path for path in partial.rglob("*") if path.is_dir())])
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        save_json(
            partial / MANIFEST,
            {"schema_version": SCHEMA_VERSION, "step": step, "files": sizes, "facts": dict(facts)},
        )
        sync([partial / MANIFEST, partial])
        with writing():
            if final.exists():  # a torn one of the same step
                shutil.rmtree(final)
            os.replace(partial, final)
        sync([self.folder])
        self._prune(step)

    def abandon(self, step: int) -> None:
        """Removes what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _prune(self, newest: int) -> None:
        for step in sorted((step for step in self._steps() if step <= newest), reverse=True)[
            self._keep :
        ]:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = [
            path.name.removeprefix("step-")
            for path in self.folder.iterdir()
            if path.name.startswith("step-")
        ]
        return [int(name) for name in names if name.isdecimal()]

    def path(self, step: int) -> Path:
        """Of a complete checkpoint."""
        return self.folder / f"step-{step}"


def _read_manifest(folder: Path, step: int) -> Mapping[str, Any]:
    """The writer's facts. Raises ValueError that says what is missing."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, files, facts = document["schema_version"], document["files"], document["facts"]
        named_step = document["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error!r}") from error
    if version != SCHEMA_VERSION or named_step != step:
        raise ValueError(
            f"{MANIFEST} is of schema {version} and step {named_step}; known is schema "
            f"{SCHEMA_VERSION}"
        )
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise ValueError(
                f"{name} has {actual} bytes, not {size}"
                if actual is not None
                else f"{name} is missing"
            )
    return dict(facts)
