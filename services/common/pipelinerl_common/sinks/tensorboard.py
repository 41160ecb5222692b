"""TensorBoard event files."""

from pathlib import Path
from typing import Any

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import TensorBoardSettings
from pipelinerl_common.sinks.rows import Row


class TensorBoardSink:
    """One event file per session in `folder`; each value is a scalar at its step and its time."""

    name = "tensorboard"

    def __init__(self, settings: TensorBoardSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._writer: Any = None

    def open(self) -> None:
        """Raises SettingsError without the extra `tensorboard`, OSError when the folder cannot be
        written.
        """
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise SettingsError(
                "tensorboard is not installed here; pip install 'pipelinerl[tensorboard]'"
            ) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder), flush_secs=self._settings.flush_seconds)

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in sorted(row.values.items())
        ]
        self._writer.add_event(
            Event(wall_time=row.time, step=row.step, summary=Summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
