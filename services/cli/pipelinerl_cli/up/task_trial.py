"""The job's task, made once before anything else, so that its mistakes are said at once and nothing
is left of the try.

In a process of its own, the one that runs plain verifiers: a task may import what it likes, and
this process is to stay small.
"""

import json
import subprocess
import sys
from pathlib import Path

from pipelinerl_actor.task import TaskName

MODULE = "pipelinerl_actor.rollout.verifier_process"
TRIAL_S = 30.0
"""A task that takes longer, since it reads much data, is left to the preparation, which makes it
once more.
"""


def task_faults(name: TaskName) -> list[str]:
    """Why the task cannot be made; empty when it can, or when it takes too long to tell."""
    hello = {
        "path": name.path,
        "args": dict(name.args),
        "seed": name.seed,
        "sys_path": [str(Path.cwd()), *sys.path],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=json.dumps(hello) + "\n",
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return [
            f"spec.task.path={name.path!r}: the process that makes it ended with status "
            f"{done.returncode}: {said[0]}"
        ]
    return [answer["error"]] if "error" in answer else []
