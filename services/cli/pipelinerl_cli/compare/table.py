"""Runs side by side, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_cli.report.svg import clock, compact, smooth
from pipelinerl_cli.results.history import RunHistory, Step
from pipelinerl_cli.results.run_folder import load_run
from pipelinerl_cli.results.summary import summarize
from pipelinerl_common.settings import Job

SMOOTHING = 5
"""A reward counts as reached when the mean of this many steps has reached it."""

COLUMNS = (
    "run",
    "policy",
    "steps",
    "time",
    "time training",
    "reward first",
    "reward last",
    "lag mean",
    "lag max",
    "ESS mean",
    "tokens/s",
    "updates",
)


@dataclass(frozen=True, slots=True)
class Compared:
    label: str
    job: Job
    history: RunHistory
    summary: dict[str, Any]

    @property
    def rewards(self) -> list[float]:
        """Mean of the last few steps' rewards, per step."""
        return smooth([step.get("reward_mean") for step in self.history.steps], SMOOTHING)


def load(roots: Sequence[Path]) -> list[Compared]:
    """Raises SettingsError when one is not a run's folder."""
    names = [root.resolve().name for root in roots]
    compared = []
    for root, name in zip(roots, names, strict=True):
        run = load_run(root)
        history = run.history()
        summary = summarize(history, status=run.status, job=run.job.name, seed=run.job.spec.seed)
        compared.append(Compared(name if names.count(name) == 1 else str(root), run.job, history, summary))
    return compared


def first_reaching(run: Compared, reward: float) -> Step | None:
    """The first step at which the smoothed reward is at least `reward`; fewer than `SMOOTHING` steps are too few to tell."""
    for k, (step, value) in enumerate(zip(run.history.steps, run.rewards, strict=True)):
        if value >= reward and k + 1 >= SMOOTHING:
            return step
    return None


def rows(runs: Sequence[Compared], rewards: Sequence[float]) -> list[list[str]]:
    return [_row(run, rewards) for run in runs]


def _row(run: Compared, rewards: Sequence[float]) -> list[str]:
    def shown(key: str) -> str:
        value = run.summary[key]
        return "-" if value is None else compact(value)

    reached = [first_reaching(run, reward) for reward in rewards]
    return [
        run.label,
        run.job.spec.staleness.policy,
        str(run.summary["steps"]),
        clock(run.summary["seconds"]),
        clock(run.summary["training_seconds"]),
        *(shown(key) for key in ("reward_first", "reward_last", "lag_mean", "lag_max", "ess_mean", "tokens_per_second")),
        str(run.summary["weight_updates"]),
        *(cell for step in reached for cell in ((clock(step.t), compact(step.samples)) if step else ("not reached", "-"))),
    ]
