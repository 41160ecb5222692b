"""Which weights a path means."""

from pathlib import Path

from pipelinerl_cli.up.folder import newest_checkpoint
from pipelinerl_common.checkpoints import MANIFEST, MODEL, checkpoint_folder
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.words import did_you_mean_folder


def find_model(path: Path) -> Path:
    """The Hugging Face folder that `path` is, holds as a checkpoint, or ended with as a run.

    Of a run, `final/` comes before the newest complete checkpoint. Raises SettingsError that says
    what was looked for.
    """
    newest = checkpoint_folder(path, newest_checkpoint(path)) / MODEL
    for folder in (
        path,
        path / MODEL if (path / MANIFEST).is_file() else path,
        path / "final",
        newest,
    ):
        if (folder / "config.json").is_file():
            return folder
    raise SettingsError(
        f"{path}: no weights here; give a folder with config.json, a checkpoint like "
        "runs/JOB/checkpoints/step-40, or a run's "
        f"folder with final/ or a complete checkpoint{did_you_mean_folder(path)}"
    )
