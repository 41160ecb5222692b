"""Weights & Biases."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import WandbSettings
from pipelinerl_common.sinks.rows import Row

STEP = "step"


class WandbSink:
    """One W&B run per run of the job: sessions after a restart go on with it, by the id that lies
    in `folder`/id.
    """

    name = "wandb"

    def __init__(
        self, settings: WandbSettings, folder: Path, *, job: str, config: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._job = job
        self._config = config
        self._run: Any = None

    def open(self) -> None:
        """Raises SettingsError without the extra `wandb`, and wandb's errors without a key or a
        network.
        """
        try:
            import wandb
        except ImportError as error:
            raise SettingsError(
                "wandb is not installed here; pip install 'pipelinerl[wandb]'"
            ) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                tags=list(settings.tags) or None,
                mode=settings.mode,
                id=self._id(),
                name=self._job,
                resume="allow" if settings.mode == "online" else None,
                dir=self._folder,
                config=dict(self._config),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, init_timeout=60
                ),
            )
        except Exception:  # wandb keeps what it began, and would say that the run is in use
            wandb.teardown()
            raise
        self._run.define_metric(
            "*", step_metric=STEP
        )  # a step that is trained again may be logged again

    def write(self, row: Row) -> None:
        self._run.log({**row.values, STEP: row.step, "time": row.time})

    def close(self) -> None:
        self._run.finish()

    def _id(self) -> str:
        file = self._folder / "id"
        if not file.exists():
            file.write_text(secrets.token_hex(4), encoding="ascii")
        return file.read_text(encoding="ascii").strip()
