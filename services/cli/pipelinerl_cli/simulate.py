"""`pipelinerl simulate`: staleness policies side by side, in virtual time."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_cli.terminal import ProgressLine
from pipelinerl_common.errors import SettingsError
from pipelinerl_planner.cluster import SimulatedCluster
from pipelinerl_planner.lengths import Lengths, read_trace
from pipelinerl_planner.outcome import SimulationOutcome
from pipelinerl_planner.presets import PRESETS, SimulationPreset
from pipelinerl_planner.simulation import SimulationRun, simulate
from pipelinerl_staleness.checks import check_whole
from pipelinerl_staleness.policy import PolicySettings
from pipelinerl_staleness.registry import POLICIES, make_policy

if TYPE_CHECKING:
    from pipelinerl_cli.report.charts import Bar
    from pipelinerl_planner.validation import Validation

MAIN = "main"
"""Stands for each policy's first parameter in `--sweep` and `--parameter`."""
COSTS = [field.name for field in fields(SimulatedCluster)]
LEGEND = (
    "main: the policy's first parameter; max/bound: largest lag seen, in steps, and the proven one",
    "effective (trained) and total (generated) in tokens per second; preemptions and re-prefilled "
    "tokens per trajectory",
    "waste: share of generated tokens not trained, cancelled while running (L2) or dropped when "
    "finished (L3); idle: trainer",
)
DARKEST_AGE = 7
"""In the plot; older tokens look the same."""


@dataclass(frozen=True, slots=True)
class PlannedSimulation:
    """One run to simulate. Example: areal with eta=2 on the lengths of seed 0."""

    policy: str
    settings: PolicySettings
    groups_per_step: int
    seed: int
    run: SimulationRun

    @property
    def main_value(self) -> Any:
        return getattr(self.settings, self.settings.parameter_names()[0])


@dataclass(frozen=True, slots=True)
class FinishedSimulation:
    """A simulated run with its outcome, and the policy's proven bound on the lag."""

    plan: PlannedSimulation
    bound: int | None
    outcome: SimulationOutcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(*flags: str, **options: Any) -> None:
        parser.add_argument(*flags, **options)

    def repeatable(flag: str, metavar: str, help_text: str) -> None:
        add(flag, action="append", default=[], metavar=metavar, help=help_text)

    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    policies = "a policy, several with commas, or all (default)"
    add("--policy", default="all", metavar="NAME", help=policies)
    add("--preset", default="article", choices=sorted(PRESETS), help=presets)
    repeatable(
        "--sweep",
        "NAME=VALUES",
        "try every value: main=1:5, num_warmup_batches=1,2,4; main is each policy's first "
        "parameter; may be repeated",
    )
    repeatable("--parameter", "NAME=VALUE", "a policy parameter to fix; may be repeated")
    costs = f"a cost of the preset to replace: {', '.join(COSTS)}; may be repeated"
    repeatable("--cluster", "NAME=VALUE", costs)
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="your own lengths, CSV or JSONL: response_tokens, prompt_tokens, group",
    )
    for flag, what in (
        ("--steps", "optimizer steps to train"),
        ("--groups-per-step", "groups of one optimizer step"),
        ("--group-size", "trajectories of one group"),
    ):
        add(flag, type=int, help=f"{what} (default: the preset's)")
    seeds = "seeds of the lengths: 3, or 0:4, or 1,5 (default 0)"
    add("--seed", "--seeds", default="0", metavar="N", help=seeds)
    add(
        "--from-run",
        type=Path,
        metavar="DIR",
        help="simulate a live run from its output folder, with costs fitted to its parts, and "
        "compare the two as wholes",
    )
    listed = "a list of runs on standard output instead of the table"
    add("--json", action="store_true", help=listed)
    details = "with --json: histograms and the rest under `details`"
    add("--details", action="store_true", help=details)
    add("--plot", type=Path, metavar="FILE", help="bar charts to a .svg or .html file")


def run(args: argparse.Namespace) -> int:
    """Simulates what the arguments ask for. Returns the exit status: 2 for bad arguments."""
    try:
        if args.from_run is not None:
            _validate(args.from_run, as_json=args.json)
            return 0
        finished = _run_all(_planned(args))
        if args.plot is not None:
            _write_plot(args.plot, finished)
    except (ValueError, OSError, RuntimeError) as error:
        raise SettingsError(str(error)) from error
    if args.json:
        documents = [_document(one, args.details) for one in finished]
        sys.stdout.write(json.dumps(documents, indent=1) + "\n")
    else:
        print(_set_up(args))
        _print_table(finished)
    return 0


def _planned(args: argparse.Namespace) -> list[PlannedSimulation]:
    preset = _preset(args)
    names = sorted(POLICIES) if args.policy == "all" else args.policy.split(",")
    fixed = _assignments(args.parameter)
    sweeps = {name: _values(values) for name, values in _assignments(args.sweep).items()}
    combinations = [dict(zip(sweeps, each, strict=True)) for each in product(*sweeps.values())]
    wanted = [(name, {**fixed, **each}) for name in names for each in combinations]
    planned = []
    for name, parameters in wanted:
        try:
            settings = preset.policy_settings(name, _for_policy(name, parameters))
            make_policy(settings, preset.groups_per_step)
        except ValueError as error:
            if len(wanted) == 1:
                raise
            print(f"simulate: skipped {name}: {error}", file=sys.stderr)
            continue
        for seed in _seeds(args.seed):
            load = SimulationRun(preset.cluster, _lengths(args, preset, seed), preset.num_steps)
            planned.append(PlannedSimulation(name, settings, preset.groups_per_step, seed, load))
    if not planned:
        raise ValueError("nothing to simulate")
    return planned


def _preset(args: argparse.Namespace) -> SimulationPreset:
    preset = PRESETS[args.preset]
    sizes = {"num_steps": "steps", "groups_per_step": "groups_per_step", "group_size": "group_size"}
    for name, argument in sizes.items():
        if (value := getattr(args, argument)) is None:
            continue
        if value < 1:
            raise ValueError(f"--{argument.replace('_', '-')} {value} must be at least 1")
        preset = replace(preset, **{name: value})
    costs = _assignments(args.cluster)
    if unknown := sorted(costs.keys() - set(COSTS)):
        raise ValueError(f"--cluster {unknown[0]}: choose one of {', '.join(COSTS)}")
    values: dict[str, Any] = {name: _value(value) for name, value in costs.items()}
    return replace(preset, cluster=replace(preset.cluster, **values))


def _set_up(args: argparse.Namespace) -> str:
    """What was simulated, in one line."""
    preset = _preset(args)
    load = f"{preset.num_steps} steps of {preset.groups_per_step} groups of {preset.group_size}"
    lengths = "" if args.trace is None else f", lengths from {args.trace}"
    return f"simulated: --preset {args.preset}, {load}{lengths} (--help: other presets and costs)"


def _lengths(args: argparse.Namespace, preset: SimulationPreset, seed: int) -> Lengths:
    if args.trace is not None:
        return read_trace(args.trace, preset.group_size)
    return preset.lengths(seed, preset.groups_per_step, preset.group_size)


def _for_policy(policy: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`main` by its name in this policy. The policy itself refuses parameters that it lacks."""
    if policy not in POLICIES:
        return dict(parameters)
    main = POLICIES[policy].parameter_names()[0]
    return {main if name == MAIN else name: _value(value) for name, value in parameters.items()}


def _assignments(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ValueError(f"{name}{equals}{value} must have the form name=value")
    return {name: value for name, _, value in pairs}


def _values(text: str) -> list[Any]:
    """1:3 is 1, 2, 3; a,b is both; anything else is itself."""
    first, colon, last = text.partition(":")
    if colon:
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"range {text} must be two whole numbers in order, for example 1:5")
        return list(range(int(first), int(last) + 1))
    return [_value(part) for part in text.split(",")]


def _seeds(text: str) -> list[int]:
    seeds = _values(text)
    for seed in seeds:
        check_whole("--seed", seed, 0)
    return seeds


def _value(text: Any) -> Any:
    """Numbers, true, false and null as in JSON; other words as they are."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return text


def _run_all(planned: Sequence[PlannedSimulation]) -> list[FinishedSimulation]:
    progress = ProgressLine()
    total = sum(one.run.num_steps for one in planned)
    done, finished = 0, []

    def advance(_: int) -> None:
        nonlocal done
        done += 1
        percent = 100 * done // total
        main = plan.settings.parameter_names()[0]
        what = f"{plan.policy} {main}={plan.main_value}"
        progress.show(f"{'#' * (percent // 4):25} {percent:3} % {what[:40]}")

    for plan in planned:
        policy = make_policy(plan.settings, plan.groups_per_step)
        outcome = simulate(policy, plan.run, advance)
        finished.append(FinishedSimulation(plan, policy.bound(), outcome))
    progress.end()
    return finished


def _document(one: FinishedSimulation, details: bool) -> dict[str, Any]:
    outcome = one.outcome
    document: dict[str, Any] = {
        "policy": one.plan.policy,
        "settings": asdict(one.plan.settings),
        "max_staleness": outcome.max_staleness,
        "bound": one.bound,
        "effective_tokens_per_second": outcome.effective_tokens_per_second,
        "total_tokens_per_second": outcome.total_tokens_per_second,
        "waste": outcome.waste,
        "waste_l2": outcome.waste_l2,
        "waste_l3": outcome.waste_l3,
        "preemptions_per_trajectory": outcome.preemptions_per_trajectory,
        "reprefill_tokens_per_trajectory": outcome.reprefill_tokens_per_trajectory,
        "drop_enrichment": outcome.drop_enrichment,
        "wall_seconds": outcome.wall_seconds,
    }
    if details:
        document["details"] = {
            "seed": one.plan.seed,
            "num_steps": outcome.num_steps,
            "trained_tokens": outcome.trained_tokens,
            "generated_tokens": outcome.generated_tokens,
            "tokens_by_staleness": outcome.tokens_by_staleness,
            "trajectories_by_staleness": outcome.trajectories_by_staleness,
            "batches_by_max_staleness": outcome.batches_by_max_staleness,
            "drop_rate": outcome.drop_rate,
            "dropped_length_ratio": outcome.dropped_length_ratio,
            "trainer_idle_seconds": outcome.trainer_idle_seconds,
        }
    return document


def _print_table(finished: Sequence[FinishedSimulation]) -> None:
    from pipelinerl_cli.terminal import print_table

    head = "policy main seed max/bound effective total waste L2 L3 preempt re-prefill idle"
    print_table(head.split(), [list(_row(one)) for one in finished])
    print("\n".join(LEGEND))


def _row(one: FinishedSimulation) -> Iterator[str]:
    outcome = one.outcome
    yield one.plan.policy
    yield str(one.plan.main_value)
    yield str(one.plan.seed)
    yield f"{outcome.max_staleness}/{'none' if one.bound is None else one.bound}"
    yield f"{outcome.effective_tokens_per_second:.0f}"
    yield f"{outcome.total_tokens_per_second:.0f}"
    for share in (outcome.waste, outcome.waste_l2, outcome.waste_l3):
        yield f"{100 * share:.1f} %"
    yield f"{outcome.preemptions_per_trajectory:.2f}"
    yield f"{outcome.reprefill_tokens_per_trajectory:.0f}"
    yield f"{100 * outcome.trainer_idle_seconds / max(outcome.wall_seconds, 1e-9):.0f} %"


def _write_plot(path: Path, finished: Sequence[FinishedSimulation]) -> None:
    """One panel per policy, a bar per run. Raises SettingsError."""
    from pipelinerl_cli.report.charts import bar_file, write_chart
    from pipelinerl_cli.report.svg import Axis

    panels: dict[str, list[Bar]] = {}
    for one in finished:
        panels.setdefault(one.plan.policy, []).append(outcome_bar(one))
    title = "Staleness policies"
    write_chart(path, title, bar_file(title, Axis("tokens/s", low=0), panels))


def outcome_bar(one: FinishedSimulation) -> "Bar":
    """Tokens per second by staleness, the older the darker, and the waste hatched on top."""
    from pipelinerl_cli.report.charts import Bar, Part

    outcome, seconds = one.outcome, one.outcome.wall_seconds
    by_age = sorted(outcome.tokens_by_staleness.items())
    parts = [
        Part(
            f"staleness {min(age, DARKEST_AGE)}{'+' * (age >= DARKEST_AGE)}",
            tokens / seconds,
            0,
            opacity=(1 + min(age, DARKEST_AGE)) / (1 + DARKEST_AGE),
        )
        for age, tokens in by_age
    ]
    parts += [
        Part("waste L2 (cancelled)", outcome.dropped_tokens_l2 / seconds, 1, is_hatched=True),
        Part("waste L3 (dropped)", outcome.dropped_tokens_l3 / seconds, 5, is_hatched=True),
    ]
    return Bar(str(one.plan.main_value), parts, f"max {outcome.max_staleness}")


def _validate(folder: Path, *, as_json: bool) -> None:
    """Compares a recorded run with its simulation."""
    from pipelinerl_planner.validation import validate  # the job's settings: not for --help

    validation = validate(folder)
    if not as_json:
        _print_validation(validation)
        return
    run = validation.run
    document = {
        "policy": run.policy,
        "settings": asdict(run.settings),
        "num_steps": run.num_steps,
        "num_lost": run.num_lost,
        "comparisons": [
            {**asdict(one), "difference": one.difference} for one in validation.comparisons
        ],
        "cost_model": asdict(validation.cluster),
    }
    print(json.dumps(document, indent=1))


def _print_validation(validation: "Validation") -> None:
    from pipelinerl_cli.terminal import print_table
    from pipelinerl_common.text import counted

    run, outcome = validation.run, validation.outcome
    steps, groups = counted(run.num_steps, "step"), counted(run.groups_per_step, "group")
    print(f"{run.policy}: {steps} of {groups}; largest lag {outcome.max_staleness} (simulated)")
    rows = []
    for one in validation.comparisons:
        unit = f" {one.unit}" if one.unit else ""
        values = (f"{value:.2f}{unit}" for value in (one.measured, one.simulated))
        rows.append([one.quantity, *values, f"{100 * one.difference:+.1f} %"])
    print_table(["", "measured", "simulated", "difference"], rows)
    print(
        "fitted to the run's parts: lengths, decode steps, requests, training steps, publishes, "
        "pauses; none of the rows above"
    )
    if run.num_lost:
        lost = counted(run.num_lost, "group")
        print(f"{lost} failed or filtered; the simulation has none of these")
