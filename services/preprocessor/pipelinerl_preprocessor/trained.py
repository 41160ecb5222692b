"""`trained.jsonl`: one line per committed step, so that anybody can check what was trained and that
nothing was twice.

{"step": 7, "incarnation": 0, "groups": [{"group_id": "0-56", "prompt_index": 56}, ...]}
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pipelinerl_common.lines import cut_torn_line
from pipelinerl_preprocessor.groups import Group


class TrainedLog:
    """Append-only, except that a rewind to step k drops the lines of step k and later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, incarnation: int, groups: Iterable[Group]) -> None:
        line = {
            "step": step,
            "incarnation": incarnation,
            "groups": [
                {"group_id": group.group_id, "prompt_index": group.prompt_index} for group in groups
            ],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)  # of a disk that was full
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def rewind(self, num_committed: int) -> None:
        """Keeps the lines of steps before `num_committed`; a line that a crash left unfinished goes
        as well.
        """
        if not self.path.exists():
            return
        kept = self.path.with_suffix(".rewinding")
        with self.path.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
            new.writelines(line for line in old if _step_of(line) < num_committed)
        os.replace(kept, self.path)


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
