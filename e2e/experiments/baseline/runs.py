"""The runs of the experiment: which there are, and how they are made, one after another, each in a
folder of its own.

```
FOLDER/plan.json                 the arguments of the experiment
FOLDER/search/conventional-4/    the search for the conventional RL to compare with, on its own seed
FOLDER/seed-1/in-flight/         a reported run; beside it <name>.cores.jsonl and <name>.terminal
```
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.baseline.cores import measure
from pipelinerl_cli.compare.runs import Compared, load_one
from pipelinerl_cli.run_folder import load_run
from pipelinerl_cli.up.orphans import tethered
from pipelinerl_common.errors import FatalError, SettingsError

SEARCH, SEARCH_SEED = "search", 1000
"""Seed of the search, which is not among the reported seeds."""
COLLAPSE = 0.1
"""A run has collapsed when its last smoothed reward is this far below its best."""
LEAST_TRIAL_STEPS = 8
PERIOD_S = 1.0
DEADLINE_S = 1200.0
"""Longest time of one run."""
STOP_S = 90.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of run. `num_steps` is G, the steps in a conventional round; None in flight."""

    num_steps: int | None
    threads: int
    """Threads of the generator and of the trainer, each."""

    @property
    def name(self) -> str:
        """Name of the setting's folders. Example: "conventional-4-threads-2"."""
        kind = "in-flight" if self.num_steps is None else f"conventional-{self.num_steps}"
        return kind if self.threads == 1 else f"{kind}-threads-{self.threads}"

    @property
    def overrides(self) -> list[str]:
        if self.num_steps is None:
            return []
        return [f"staleness={{policy: conventional, stepsPerGeneration: {self.num_steps}}}"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of an experiment, from which all its runs follow."""

    job: str
    """The job file. Conventional runs differ from it in their staleness policy alone."""
    seeds: int
    conventional: tuple[int, ...]
    steps: int
    goal: float
    cores: int
    overrides: tuple[str, ...] = ()
    """Settings below spec that replace the job file's in all runs, as path=value."""

    @property
    def threads(self) -> int:
        """The generator's and the trainer's share of the cores."""
        return max(1, self.cores // 2)

    @property
    def in_flight(self) -> Setting:
        return Setting(None, self.threads)

    @property
    def searched(self) -> list[Setting]:
        return [Setting(g, self.threads) for g in self.conventional]

    @property
    def most_runs(self) -> int:
        return len(self.searched) + 1 + 3 * self.seeds

    def widened(self, setting: Setting) -> Setting:
        """Threads of processes that compute with all cores: in conventional RL one computes at a
        time.
        """
        return replace(setting, threads=self.cores)

    def trial_steps(self, setting: Setting) -> int:
        """Steps that suffice to measure how fast a setting is: threads do not change what it
        learns.
        """
        return min(self.steps, max(LEAST_TRIAL_STEPS, 2 * (setting.num_steps or 1)))

    def reported(self, best: Setting) -> list[Setting]:
        """In flight, the best conventional setting, and the strictly on-policy one."""
        return list(dict.fromkeys([self.in_flight, best, replace(best, num_steps=1)]))

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Raises SettingsError when `folder` holds no experiment."""
        try:
            document: dict[str, Any] = json.loads(
                (folder / "plan.json").read_text(encoding="utf-8")
            )
            lists = {name: tuple(document[name]) for name in ("conventional", "overrides")}
            return cls(**{**document, **lists})
        except FileNotFoundError as error:
            raise SettingsError(
                f"{folder}: no experiment in it: it has no plan.json; give the --output of a `run`"
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"{folder / 'plan.json'}: not an experiment's plan: {error!r}; use a new folder"
            ) from error

    def write(self, folder: Path) -> None:
        """Raises SettingsError when the folder holds another experiment."""
        if (folder / "plan.json").exists() and (earlier := Plan.read(folder)) != self:
            raise SettingsError(
                f"--output {folder}: it holds an experiment of {earlier}, not of {self}; use a new "
                "folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(
            json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8"
        )


def place(folder: Path, seed: int, setting: Setting) -> Path:
    return folder / (SEARCH if seed == SEARCH_SEED else f"seed-{seed}") / setting.name


def is_finished(root: Path) -> bool:
    return (root / "summary.json").is_file() and load_run(root).status == "finished"


def is_stable(run: Compared, goal: float) -> bool:
    """Whether the run reaches the goal and does not collapse."""
    best = run.best_reward
    return (
        best is not None
        and run.first_reaching(goal) is not None
        and run.rewards[-1] >= best - COLLAPSE
    )


def best_conventional(folder: Path, plan: Plan) -> Setting:
    """The stable setting of the search that reaches the goal first; with all cores for each process
    if that was tried and is faster. Raises SettingsError when there is none.
    """
    reached: dict[Setting, float] = {}
    for setting in plan.searched:
        run = load_one(place(folder, SEARCH_SEED, setting), setting.name)
        if (step := run.first_reaching(plan.goal)) is not None and is_stable(run, plan.goal):
            reached[setting] = step.t
    if not reached:
        raise SettingsError(
            f"--conventional {','.join(map(str, plan.conventional))}: none comes to a reward of "
            f"{plan.goal:g} in "
            f"{plan.steps} steps and stays there; give more --steps or smaller numbers"
        )
    best = min(reached, key=lambda setting: reached[setting])
    wide = plan.widened(best)
    if not is_finished(place(folder, SEARCH_SEED, wide)):
        return best
    return min((best, wide), key=lambda setting: trial_seconds(folder, plan, setting))


def trial_seconds(folder: Path, plan: Plan, setting: Setting) -> float:
    """Seconds of the first steps of a run of the search, as many as a trial of threads makes."""
    steps = load_one(place(folder, SEARCH_SEED, setting), setting.name).history.steps
    return steps[min(plan.trial_steps(setting), len(steps)) - 1].t


def up(plan: Plan, root: Path, seed: int, setting: Setting) -> None:
    """Makes one run of `pipelinerl up` and records its use of the cores meanwhile. Raises
    FatalError when it fails.
    """
    command = [
        sys.executable,
        "-m",
        "pipelinerl_cli",
        "up",
        plan.job,
        "--fresh",
        "--output",
        str(root),
    ]
    overrides = [f"seed={seed}", *plan.overrides, *setting.overrides]
    command += [
        "--max-steps",
        str(plan.steps),
        *(word for override in overrides for word in ("--set", override)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    root.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + DEADLINE_S
    terminal = root.with_name(f"{root.name}.terminal")
    with (
        terminal.open("wb") as output,
        root.with_name(f"{root.name}.cores.jsonl").open("w", encoding="utf-8") as cores,
        subprocess.Popen(
            tethered(command), stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            while not _ended(process):
                cores.write(measure(process.pid, time.time()).to_json() + "\n")
                if time.monotonic() > deadline:
                    raise FatalError(
                        f"{root}: the run has not ended after {DEADLINE_S:g} s; see {terminal}"
                    )
        finally:
            process.terminate()
            process.wait(STOP_S)
    if process.returncode != 0:
        raise FatalError(f"{root}: the run ended with status {process.returncode}; see {terminal}")


CarryOut = Callable[[Plan, Path, int, Setting], None]


class Experiment:
    """Makes the runs of a plan in a folder. Finished runs are kept; an
    unfinished one is started again from the beginning.
    """

    def __init__(
        self, folder: Path, plan: Plan, say: Callable[[str], None], carry_out: CarryOut = up
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._carry_out = carry_out
        self._seconds: list[float] = []
        self._num_done = 0
        self._num_runs = plan.most_runs

    def run(self) -> None:
        """Raises SettingsError, and FatalError when a run fails."""
        self._plan.write(self._folder)
        self._say(
            f"at most {self._num_runs} runs, one after another; stopped with Ctrl-C, the same "
            "command resumes"
        )
        for setting in self._plan.searched:
            self._run(SEARCH_SEED, setting)
        best = best_conventional(self._folder, self._plan)
        wide = self._plan.widened(best)
        if wide != best:
            self._run(SEARCH_SEED, wide, self._plan.trial_steps(best))
            best = best_conventional(self._folder, self._plan)
        reported = self._plan.reported(best)
        self._num_runs = self._num_done + len(reported) * self._plan.seeds
        self._say(f"the best stable conventional setting of the search is {best.name}")
        for seed in range(1, self._plan.seeds + 1):
            for setting in rotated(reported, seed):
                self._run(seed, setting)

    def _run(self, seed: int, setting: Setting, num_steps: int | None = None) -> None:
        root = place(self._folder, seed, setting)
        self._num_done += 1
        where = f"[{self._num_done}/{self._num_runs}] {root.relative_to(self._folder)}"
        if is_finished(root):
            self._say(f"{where}: is there already")
            return
        began = time.monotonic()
        plan = replace(self._plan, steps=num_steps or self._plan.steps)
        self._carry_out(plan, root, seed, setting)
        self._seconds.append(time.monotonic() - began)
        left = (self._num_runs - self._num_done) * sum(self._seconds) / len(self._seconds)
        self._say(
            f"{where}: {_line(load_one(root, setting.name), self._plan.goal)}; about "
            f"{left / 60:.0f} min left"
        )


def rotated(settings: Sequence[Setting], seed: int) -> list[Setting]:
    """The order of a seed's runs: another one is first for every seed, so that no setting always
    follows the same one."""
    first = seed % len(settings)
    return [*settings[first:], *settings[:first]]


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    """Waits a period for it."""
    try:
        process.wait(PERIOD_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _line(run: Compared, goal: float) -> str:
    step = run.first_reaching(goal)
    reached = f"reward {goal:g} after {step.t:.0f} s" if step else f"never a reward of {goal:g}"
    summary = run.summary
    spent = f"{summary['steps']} steps in {summary['training_seconds']:.0f} s of training"
    return f"{spent}, {reached}, at the end {summary['reward_last']:.3f}"
