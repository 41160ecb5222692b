"""What `pipelinerl up` says about itself in the run's records: that a session began, restarts, how
many actors there are.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping

from pipelinerl_cli.results.active_time import SESSION_START
from pipelinerl_cli.results.metrics_file import SESSION_ROLE, MetricsWriter, Record
from pipelinerl_cli.up.view import RunView
from pipelinerl_common.words import counted
from pipelinerl_operator.scaling.metrics import Scale

log = logging.getLogger(__name__)


class SessionRecords:
    """Of one session: written to the run's file, and shown."""

    def __init__(self, writer: MetricsWriter, view: RunView) -> None:
        self.restarts: Counter[str] = Counter()
        """By the name of what was started again."""
        self.num_lost = 0
        """Records that could not be written."""
        self._writer = writer
        self._view = view
        self._scale: Scale | None = None

    def begin(self) -> None:
        self._write({SESSION_START: 1.0, **self._restart_values()})

    def end(self) -> None:
        self._write(self._restart_values())
        self._writer.close()
        if self.num_lost:
            log.warning(
                "%s of this session could not be written to %s",
                counted(self.num_lost, "record"),
                self._writer.path,
            )

    def count_restart(self, name: str) -> None:
        self.restarts[name] += 1
        self._write(self._restart_values())

    def take(self, name: str, value: float) -> None:
        self._write({name: value})

    def take_scale(self, scale: Scale) -> None:
        """Written when it has changed."""
        if scale != self._scale:
            self._scale = scale
            self._write(scale.values())

    def _restart_values(self) -> dict[str, float]:
        by_process = {
            f"restarts_{name}_process_total": float(count) for name, count in self.restarts.items()
        }
        return {"restarts_total": float(self.restarts.total()), **by_process}

    def _write(self, values: Mapping[str, float]) -> None:
        record = Record(SESSION_ROLE, SESSION_ROLE, time.time(), -1, values)
        try:
            self._writer.write(record)
        except OSError as error:  # a full disk must end neither the run nor who keeps watch over it
            if not self.num_lost:
                log.warning(
                    "the run goes on, but %s cannot be written to: %s", self._writer.path, error
                )
            self.num_lost += 1
        self._view.take(record)
