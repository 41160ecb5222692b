"""The evaluator beside a run: how far it is."""

from collections.abc import Sequence
from pathlib import Path

from pipelinerl_actor.evaluation.results import evaluated_steps
from pipelinerl_cli.up.view import RunView
from pipelinerl_common.metrics import EVALUATOR
from pipelinerl_common.settings import Job


def is_evaluated(job: Job, root: Path) -> bool:
    """Whether nothing of the finished run in `root` is left to be evaluated."""
    return (
        job.spec.evaluation is None
        or max(evaluated_steps(root), default=-1) >= job.spec.algorithm.steps
    )


def progress(view: RunView, sets: Sequence[str]) -> str:
    """Of the running evaluation. Example: "set held-out 34/128"; what is waited for when none runs."""
    running = view.gauge(EVALUATOR, "evaluation_running_step")
    if running is None or running < 0:
        return "waiting for the evaluator"
    for name in sets:
        done = view.gauge(EVALUATOR, f"evaluation_prompts_done{{set={name}}}") or 0
        planned = view.gauge(EVALUATOR, f"evaluation_prompts_planned{{set={name}}}") or 0
        if done < planned:
            return f"set {name} {done:.0f}/{planned:.0f}"
    return "writing the result"
