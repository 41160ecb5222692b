"""The job's evaluation sets as tasks."""

from pipelinerl_actor.task import Task, TaskName
from pipelinerl_actor.task_loader import load_task
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import EvaluationSetSettings, Job, JobSpec, TaskSettings


def task_of(spec: JobSpec, each: EvaluationSetSettings) -> TaskSettings:
    """A set as a task; what the set does not say is as in training."""
    own = {
        "path": each.path,
        "args": each.args,
        "group_size": each.samples_per_prompt,
        "min_group_fraction": 1.0,
    }
    return spec.task.model_copy(update={**own, "sampling": each.sampling or spec.task.sampling})


def seed_of(spec: JobSpec) -> int:
    """Of the sets' prompts: those of a task that draws them are others than it is trained on, as in
    `pipelinerl eval`.
    """
    return spec.seed + 1


def make_sets(job: Job) -> dict[str, Task]:
    """Every set's task, by the set's name; one serves all evaluations. Raises SettingsError that
    names the set.
    """
    made: dict[str, Task] = {}
    for each in job.spec.evaluation.sets if job.spec.evaluation is not None else ():
        try:
            made[each.name] = load_task(TaskName(each.path, each.args, seed_of(job.spec)))
        except SettingsError as error:
            raise SettingsError(f"evaluation set {each.name!r}: {error}") from error
    return made
