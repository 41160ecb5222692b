"""The report of an experiment: tables in Markdown, numbers in JSON, plots in SVG."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.baseline import targets
from experiments.baseline.numbers import (
    Overlap,
    Ratio,
    RunNumbers,
    numbers_of,
    overlap,
    paired_ratio,
)
from experiments.baseline.runs import (
    SEARCH_SEED,
    Plan,
    Setting,
    best_conventional,
    is_finished,
    is_stable,
    place,
)
from experiments.baseline.targets import Target, shown
from pipelinerl_cli.compare.page import BEHAVIOUR, LEARNING
from pipelinerl_cli.compare.runs import Compared, Variant, load_one
from pipelinerl_cli.compare.table import cell, note, table
from pipelinerl_cli.report.charts import svg_file
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import markdown_table

NOISY_CORES = 0.1
"""More cores than these in use by others are reported as a disturbance."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A setting with its finished runs, one per seed."""

    setting: Setting
    variant: Variant
    numbers: tuple[RunNumbers, ...]

    @property
    def seeds(self) -> set[int]:
        return {run.seed for run in self.numbers}

    def values(
        self, seeds: Sequence[int], of: Callable[[RunNumbers], float | None]
    ) -> list[float | None]:
        by_seed = {run.seed: of(run) for run in self.numbers}
        return [by_seed[seed] for seed in seeds]


@dataclass(frozen=True, slots=True)
class Report:
    """The finished runs of an experiment by setting, and what they are compared by."""

    plan: Plan
    searched: tuple[Arm, ...]
    best: Arm
    arms: tuple[Arm, ...]
    """The arms: in flight, then the conventional ones, the best first."""

    @classmethod
    def of(cls, folder: Path) -> "Report":
        """Reads the experiment. Raises SettingsError when runs that it needs are missing."""
        plan = Plan.read(folder)
        missing = [
            setting.name
            for setting in plan.searched
            if not is_finished(place(folder, SEARCH_SEED, setting))
        ]
        if missing:
            raise SettingsError(
                f"{folder}: the search has not finished ({', '.join(missing)}); resume with `run` "
                "first"
            )
        best = best_conventional(folder, plan)
        wide = map(plan.widened, plan.searched)
        searched = [
            arm
            for s in dict.fromkeys([*plan.searched, *wide])
            if (arm := _arm(folder, plan, s, [SEARCH_SEED]))
        ]
        seeds = range(1, plan.seeds + 1)
        arms = [
            arm for setting in plan.reported(best) if (arm := _arm(folder, plan, setting, seeds))
        ]
        chosen = next((arm for arm in arms if arm.setting == best), None)
        if chosen is None or arms[0].setting != plan.in_flight:
            raise SettingsError(
                f"{folder}: no reported seed has finished both ways; resume with `run` first"
            )
        return cls(plan, tuple(searched), chosen, tuple(arms))

    @property
    def in_flight(self) -> Arm:
        return self.arms[0]

    @property
    def _whole(self) -> list[Arm]:
        """Runs of the search that were more than a trial of threads."""
        return [arm for arm in self.searched if arm.setting in self.plan.searched]

    @property
    def overlap(self) -> Overlap:
        return overlap(self.best.numbers, self.in_flight.numbers, self.plan.cores)

    def ratio(
        self, above: Arm, below: Arm, of: Callable[[RunNumbers], float | None]
    ) -> Ratio | None:
        seeds = sorted(above.seeds & below.seeds)
        return paired_ratio(above.values(seeds, of), below.values(seeds, of))

    def targets(self) -> list[Target]:
        mine, theirs = self.in_flight, self.best
        conventional = [
            (arm.setting.num_steps or 0, run)
            for arm in (*self._whole, *self.arms[1:])
            for run in arm.numbers
        ]
        return [
            targets.speed_up(self.ratio(theirs, mine, lambda run: run.seconds_to_goal)),
            targets.samples(self.ratio(mine, theirs, lambda run: run.trajectories_to_goal)),
            targets.ess(mine.numbers, conventional, theirs.setting.num_steps or 0),
        ]

    def pictures(self) -> Iterator[tuple[str, str]]:
        """The plots as SVG text by file name."""
        variants = [arm.variant for arm in self.arms]
        for picture in (*LEARNING, *BEHAVIOUR):
            yield picture.name, svg_file(*picture.of(variants))

    def json(self) -> str:
        document = {
            "plan": asdict(self.plan),
            "best": self.best.setting.name,
            "targets": [asdict(target) for target in self.targets()],
            "ratios": {
                arm.setting.name: {name: asdict(ratio) for name, ratio in self._ratios(arm)}
                for arm in self.arms[1:]
            },
            "overlap": asdict(self.overlap) | {"speed_up": self.overlap.speed_up},
            "runs": [_document(run) for arm in self.arms for run in arm.numbers],
            "search": [_document(run) for arm in self.searched for run in arm.numbers],
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    def markdown(self) -> str:
        plan = self.plan
        variants = [arm.variant for arm in self.arms]
        parts = [
            f"Goal: a reward of {plan.goal:g}. {plan.steps} steps, seeds "
            f"{_listed(self.in_flight.seeds)}, {plan.cores} cores. "
            f"The job is {self._job()}. "
            f"The conventional RL to compare with: {self.best.setting.name}.",
            markdown_table(
                ("target", "wanted", "measured", ""),
                [
                    (each.name, each.wanted, each.measured, "met" if each.is_met else "not met")
                    for each in self.targets()
                ],
            ),
            self._why(),
            markdown_table(*table(variants, [plan.goal])),
            note(variants),
            markdown_table(
                (
                    "ratio over the seeds, 95 % interval",
                    *(arm.setting.name for arm in self.arms[1:]),
                ),
                self._ratio_rows(),
            ),
            "Where the time goes, mean of the seeds (lowest to highest):",
            markdown_table(("", *(arm.setting.name for arm in self.arms)), self._time_rows()),
            *self._disturbance(),
            f"The search for the best conventional setting, on seed {SEARCH_SEED}:",
            markdown_table(*self._search()),
        ]
        return "\n\n".join(parts) + "\n"

    def _job(self) -> str:
        name = Path(self.plan.job).name
        return f"{name} with {', '.join(self.plan.overrides)}" if self.plan.overrides else name

    def _why(self) -> str:
        """The bound on the speed-up, from the measured seconds and cores."""
        made = self.overlap
        measured = self.ratio(self.in_flight, self.best, lambda run: run.trajectories_per_second)
        phases = (
            f"Per step {self.best.setting.name} generates for {made.generation_s:.2f} s and trains "
            "for "
            f"{made.training_s:.2f} s. Wholly at the same time, each as fast as alone, "
            f"they would be {made.speed_up_of_phases:.2f} times as fast"
        )
        room = (
            f"; but all processes of the in-flight runs together take {made.core_seconds:.2f} "
            "core-seconds per step, "
            f"{made.core_seconds / made.num_cores:.2f} s of {made.num_cores} cores, which leaves "
            f"{made.speed_up:.2f} times"
            if made.least_s > max(made.generation_s, made.training_s)
            else f" ({made.core_seconds:.2f} core-seconds per step leave room for that)"
            * (made.core_seconds > 0)
        )
        return f"{phases}{room}. Measured: trajectories per second {shown(measured)} times as many."

    def _ratios(self, arm: Arm) -> Iterator[tuple[str, Ratio]]:
        """Ratios of a conventional arm to the in-flight one; above 1 favours in-flight RL."""
        mine = self.in_flight
        for name, above, below, of in (
            ("time to goal", arm, mine, lambda run: run.seconds_to_goal),
            ("trajectories to goal", arm, mine, lambda run: run.trajectories_to_goal),
            ("tokens to goal", arm, mine, lambda run: run.tokens_to_goal),
            ("trajectories/s", mine, arm, lambda run: run.trajectories_per_second),
        ):
            if (ratio := self.ratio(above, below, of)) is not None:
                yield name, ratio

    def _ratio_rows(self) -> list[list[str]]:
        of_arms = [dict(self._ratios(arm)) for arm in self.arms[1:]]
        names = ("time to goal", "trajectories to goal", "tokens to goal", "trajectories/s")
        sides = dict.fromkeys(names, "conventional / in-flight") | {
            "trajectories/s": "in-flight / conventional"
        }
        return [
            [f"{name}, {sides[name]}", *(shown(ratios.get(name)) for ratios in of_arms)]
            for name in names
        ]

    def _time_rows(self) -> list[list[str]]:
        roles = sorted(
            {role for arm in self.arms for run in arm.numbers for role in run.cores_by_role}
        )
        measures: list[tuple[str, Callable[[RunNumbers], float | None], Callable[[float], str]]] = [
            ("seconds per step", lambda run: run.seconds_per_step, "{:.3f}".format),
            (
                "of it the trainer waits for its batch",
                lambda run: run.generation_s,
                "{:.3f}".format,
            ),
            ("of it the trainer works", lambda run: run.training_s, "{:.3f}".format),
            (
                "generator decodes, share of the time",
                lambda run: run.generator_busy,
                "{:.0%}".format,
            ),
            (
                "cores in use, all processes",
                lambda run: sum(run.cores_by_role.values()) or None,
                "{:.2f}".format,
            ),
            *((f"cores in use, {role}", _cores_of(role), "{:.2f}".format) for role in roles),
        ]
        return [
            [name, *(cell(map(of, arm.numbers), form) for arm in self.arms)]
            for name, of, form in measures
        ]

    def _disturbance(self) -> list[str]:
        noisy = [
            run for arm in self.arms for run in arm.numbers if run.cores_of_others > NOISY_CORES
        ]
        if not noisy:
            return []
        worst = max(noisy, key=lambda run: run.cores_of_others)
        return [
            f"**Disturbed:** in {len(noisy)} of {sum(len(arm.numbers) for arm in self.arms)} runs "
            "something else used "
            f"more than {NOISY_CORES:g} cores, up to {worst.cores_of_others:.2f} ({worst.setting}, "
            f"seed {worst.seed}). "
            "Times are not to be trusted then: of cores that are short in-flight RL's two busy "
            "processes get more than "
            "conventional RL's one."
        ]

    def _search(self) -> tuple[Sequence[str], list[list[str]]]:
        steps = self.plan.trial_steps(self.best.setting)
        head = (
            "setting",
            "time to goal (s)",
            "trajectories to goal",
            "reward at the end",
            "ESS mean",
            "stable",
            f"{steps} steps (s)",
        )
        rows = []
        for arm in self.searched:
            (run,), (number,) = arm.variant.runs, arm.numbers
            reached = (
                [number.seconds_to_goal],
                [number.trajectories_to_goal],
                [number.reward_last],
                [number.ess_mean],
            )
            forms = ("{:.1f}".format, "{:.0f}".format, "{:.3f}".format, "{:.4f}".format)
            cells = [cell(values, form) for values, form in zip(reached, forms, strict=True)]
            stable = (
                "-" if arm not in self._whole else "yes" if is_stable(run, self.plan.goal) else "no"
            )
            rows.append(
                [
                    arm.setting.name,
                    *cells,
                    stable,
                    f"{run.history.steps[min(steps, number.steps) - 1].t:.1f}",
                ]
            )
        return head, rows


def _arm(folder: Path, plan: Plan, setting: Setting, seeds: Sequence[int]) -> Arm | None:
    """The arm of a setting; None without a finished run."""
    roots = [place(folder, seed, setting) for seed in seeds]
    runs: list[Compared] = [load_one(root, setting.name) for root in roots if is_finished(root)]
    if not runs:
        return None
    return Arm(
        setting,
        Variant(setting.name, tuple(runs)),
        tuple(numbers_of(run, setting.name, plan.goal) for run in runs),
    )


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _document(run: RunNumbers) -> dict[str, object]:
    return asdict(run) | {"generation_s": run.generation_s, "core_seconds": run.core_seconds}


def _cores_of(role: str) -> Callable[[RunNumbers], float | None]:
    return lambda run: run.cores_by_role.get(role)
