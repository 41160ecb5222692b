"""That the trainer went back to a checkpoint, as the preprocessor tells it at once."""

from pipelinerl_cli.results.counters import increase
from pipelinerl_cli.results.metrics_file import Record
from pipelinerl_common.metrics import PREPROCESSOR
from pipelinerl_common.words import counted

DROPPED = "groups_dropped_total{reason=rollback}"


class Setback:
    """Fed with the records of a run in their order."""

    def __init__(self) -> None:
        self.line = ""
        """What the newest record tells of it; empty where it tells of none."""
        self._step = 0
        """Steps committed."""
        self._dropped = 0.0

    def take(self, record: Record) -> None:
        self.line = ""
        if record.role != PREPROCESSOR or record.step < 0:
            return
        dropped = record.values.get(DROPPED, 0.0)
        if record.step < self._step:
            self.line = _line(record.step, self._step, int(increase(self._dropped, dropped)))
        self._step, self._dropped = record.step, dropped


def _line(step: int, was: int, num_dropped: int) -> str:
    """Example: "the trainer goes on after step 10: steps 11 to 16 are done again, 96 groups were
    dropped".
    """
    again = f"step {was} is" if was == step + 1 else f"steps {step + 1} to {was} are"
    groups = (
        f", {counted(num_dropped, 'group')} {'was' if num_dropped == 1 else 'were'} dropped"
        if num_dropped
        else ""
    )
    return f"the trainer goes on after step {step}: {again} done again{groups}"
