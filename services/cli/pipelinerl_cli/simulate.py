"""A validation for people and for programs.

`pipelinerl simulate`: staleness policies side by side, in virtual time.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import counted
from pipelinerl_planner.charts import Bar, write_chart
from pipelinerl_planner.cluster import Cluster
from pipelinerl_planner.lengths import Lengths, read_trace
from pipelinerl_planner.outcome import Outcome
from pipelinerl_planner.presets import PRESETS, Preset
from pipelinerl_planner.simulation import Run, simulate
from pipelinerl_planner.validation import Validation
from pipelinerl_staleness.checks import check_whole
from pipelinerl_staleness.policy import Policy, PolicySettings
from pipelinerl_staleness.registry import POLICIES, make_policy


def validation_table(validation: Validation) -> str:
    run, outcome = validation.run, validation.outcome
    rows = [("", "measured", "simulated", "difference")]
    for one in validation.comparisons:
        unit = f" {one.unit}" if one.unit else ""
        rows.append(
            (
                one.quantity,
                f"{one.measured:.2f}{unit}",
                f"{one.simulated:.2f}{unit}",
                f"{100 * one.difference:+.1f} %",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        "  ".join(
            t.ljust(w) if i == 0 else t.rjust(w)
            for i, (t, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in rows
    ]
    steps, groups = counted(run.num_steps, "step"), counted(run.groups_per_step, "group")
    head = f"{run.policy}: {steps} of {groups}; largest lag {outcome.max_staleness} (simulated)"
    lost = (
        [f"{counted(run.num_lost, 'group')} failed or filtered; the simulation has none of these"]
        if run.num_lost
        else []
    )
    return "\n".join(
        [
            head,
            *table,
            "fitted to the run's parts: lengths, decode steps, requests, training steps, "
            "publishes, pauses; "
            "none of the rows above",
            *lost,
        ]
    )


def validation_json(validation: Validation) -> str:
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
    return json.dumps(document, indent=1)


MAIN = "main"
"""Stands for each policy's first parameter in `--sweep` and `--parameter`."""
LEGEND = (
    "main: the policy's first parameter; max/bound: largest lag seen, in steps, and the proven one",
    "effective (trained) and total (generated) in tokens per second; preemptions and re-prefilled "
    "tokens per trajectory",
    "waste: share of generated tokens not trained, cancelled while running (L2) or dropped when "
    "finished (L3); idle: trainer",
)


@dataclass(frozen=True, slots=True)
class Finished:
    """One simulated run. Example: areal with eta=2, seed 0, and what came of it."""

    policy: str
    settings: PolicySettings
    bound: int | None
    seed: int
    outcome: Outcome

    @property
    def main_value(self) -> Any:
        return getattr(self.settings, self.settings.parameter_names()[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAME",
        help="a policy, several with commas, or all (default)",
    )
    parser.add_argument("--preset", default="article", choices=sorted(PRESETS), help=presets)
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="try every value: main=1:5, num_warmup_batches=1,2,4; main is each policy's first "
        "parameter; may be repeated",
    )
    parser.add_argument(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a policy parameter to fix; may be repeated",
    )
    parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a cost of the preset to replace: "
        f"{', '.join(field.name for field in fields(Cluster))}; may be repeated",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="your own lengths, CSV or JSONL: response_tokens, prompt_tokens, group",
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps to train (default: the preset's)"
    )
    parser.add_argument(
        "--groups-per-step", type=int, help="groups of one optimizer step (default: the preset's)"
    )
    parser.add_argument(
        "--group-size", type=int, help="trajectories of one group (default: the preset's)"
    )
    parser.add_argument(
        "--seed",
        "--seeds",
        default="0",
        metavar="N",
        help="seeds of the lengths: 3, or 0:4, or 1,5 (default 0)",
    )
    parser.add_argument(
        "--from-run",
        type=Path,
        metavar="DIR",
        help="simulate a live run from its output folder, with costs fitted to its parts, and "
        "compare the two as wholes",
    )
    parser.add_argument(
        "--json", action="store_true", help="a list of runs on standard output instead of the table"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="with --json: histograms and the rest under `details`",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="bar charts to a .svg or .html file"
    )


def run(args: argparse.Namespace) -> int:
    """Simulates what the arguments ask for. Returns the exit status: 2 for arguments that make no
    sense.
    """
    try:
        if args.from_run is not None:
            sys.stdout.write(_validated(args.from_run, as_json=args.json) + "\n")
            return 0
        finished = _run_all(_plan(args), sys.stderr)
        if args.plot is not None:
            write_chart(args.plot, _panels(finished))
    except (ValueError, OSError, RuntimeError, SettingsError) as error:
        print(f"simulate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if args.json:
        sys.stdout.write(
            json.dumps([_record(one, args.details) for one in finished], indent=1) + "\n"
        )
    else:
        sys.stdout.write(_table(finished))
    return 0


def _validated(run: Path, *, as_json: bool) -> str:
    from pipelinerl_planner.validation import validate  # the job's settings: not for --help

    return (validation_json if as_json else validation_table)(validate(run))


@dataclass(frozen=True, slots=True)
class _Job:
    policy: str
    settings: PolicySettings
    groups_per_step: int
    seed: int
    run: Run

    def make(self) -> Policy:
        return make_policy(self.settings, self.groups_per_step)


def _plan(args: argparse.Namespace) -> list[_Job]:
    preset = _preset(args)
    chosen = _assignments(args.parameter)
    names = sorted(POLICIES) if args.policy == "all" else args.policy.split(",")
    sweeps = {name: _values(values) for name, values in _assignments(args.sweep).items()}
    jobs = []
    refused: list[str] = []
    for name in names:
        for combination in _combinations(sweeps):
            try:
                settings = preset.policy_settings(
                    name, _for_policy(name, {**chosen, **combination})
                )
                make_policy(settings, preset.groups_per_step)
            except ValueError as error:
                if len(names) == 1 and len(list(_combinations(sweeps))) == 1:
                    raise
                refused.append(f"{name}: {error}")
                continue
            for seed in _seeds(args.seed):
                lengths = _lengths(args, preset, seed)
                jobs.append(
                    _Job(
                        name,
                        settings,
                        preset.groups_per_step,
                        seed,
                        Run(preset.cluster, lengths, preset.num_steps),
                    )
                )
    for reason in refused:
        print(f"simulate: skipped {reason}", file=sys.stderr)  # noqa: T201
    if not jobs:
        raise ValueError("nothing to simulate")
    return jobs


def _preset(args: argparse.Namespace) -> Preset:
    preset = PRESETS[args.preset]
    for argument, name in (
        ("steps", "num_steps"),
        ("groups_per_step", "groups_per_step"),
        ("group_size", "group_size"),
    ):
        value = getattr(args, argument)
        if value is not None:
            if value < 1:
                raise ValueError(f"--{argument.replace('_', '-')} {value} must be at least 1")
            preset = replace(preset, **{name: value})
    costs = _assignments(args.cluster)
    unknown = set(costs) - {field.name for field in fields(Cluster)}
    if unknown:
        raise ValueError(
            f"--cluster {sorted(unknown)[0]}: choose one of "
            f"{', '.join(field.name for field in fields(Cluster))}"
        )
    values: dict[str, Any] = {name: _value(value) for name, value in costs.items()}
    return replace(preset, cluster=replace(preset.cluster, **values))


def _lengths(args: argparse.Namespace, preset: Preset, seed: int) -> Lengths:
    if args.trace is not None:
        return read_trace(args.trace, preset.group_size)
    return preset.lengths(seed, preset.groups_per_step, preset.group_size)


def _for_policy(policy: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`main` by its name in this policy. Parameters that the policy lacks are refused by the policy
    itself.
    """
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


def _combinations(sweeps: Mapping[str, Sequence[Any]]) -> Sequence[dict[str, Any]]:
    combinations: list[dict[str, Any]] = [{}]
    for name, values in sweeps.items():
        combinations = [{**one, name: value} for one in combinations for value in values]
    return combinations


def _run_all(jobs: Sequence[_Job], screen: TextIO) -> list[Finished]:
    progress = _Progress(sum(job.run.num_steps for job in jobs), screen)
    finished = []
    for job in jobs:
        policy = job.make()
        progress.begin(
            f"{job.policy} "
            f"{job.settings.parameter_names()[0]}={getattr(job.settings, job.settings.parameter_names()[0])}"
        )
        outcome = simulate(policy, job.run, progress.advance)
        finished.append(Finished(job.policy, job.settings, policy.bound(), job.seed, outcome))
    progress.end()
    return finished


class _Progress:
    """One line on a terminal, nothing elsewhere."""

    def __init__(self, num_steps: int, screen: TextIO) -> None:
        self._num_steps = num_steps
        self._screen = screen if screen.isatty() else None
        self._done = 0
        self._what = ""
        self._shown = -1

    def begin(self, what: str) -> None:
        self._what = what

    def advance(self, _: int) -> None:
        self._done += 1
        percent = 100 * self._done // self._num_steps
        if self._screen is not None and percent != self._shown:
            self._shown = percent
            self._screen.write(f"\r{'#' * (percent // 4):25} {percent:3} % {self._what[:40]:40}")
            self._screen.flush()

    def end(self) -> None:
        if self._screen is not None:
            self._screen.write("\r" + " " * 80 + "\r")


def _record(one: Finished, details: bool) -> dict[str, Any]:
    outcome = one.outcome
    record: dict[str, Any] = {
        "policy": one.policy,
        "settings": asdict(one.settings),
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
        record["details"] = {
            "seed": one.seed,
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
    return record


def _table(finished: Sequence[Finished]) -> str:
    head = (
        "policy",
        "main",
        "seed",
        "max/bound",
        "effective",
        "total",
        "waste",
        "L2",
        "L3",
        "preempt",
        "re-prefill",
        "idle",
    )
    rows: list[tuple[str, ...]] = [head]
    for one in finished:
        o = one.outcome
        rows.append(
            (
                one.policy,
                str(one.main_value),
                str(one.seed),
                f"{o.max_staleness}/{'none' if one.bound is None else one.bound}",
                f"{o.effective_tokens_per_second:.0f}",
                f"{o.total_tokens_per_second:.0f}",
                *(f"{100 * share:.1f} %" for share in (o.waste, o.waste_l2, o.waste_l3)),
                f"{o.preemptions_per_trajectory:.2f}",
                f"{o.reprefill_tokens_per_trajectory:.0f}",
                f"{100 * o.trainer_idle_seconds / max(o.wall_seconds, 1e-9):.0f} %",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([*lines, *LEGEND, ""])


def _panels(finished: Sequence[Finished]) -> dict[str, list[Bar]]:
    panels: dict[str, list[Bar]] = {}
    for one in finished:
        o = one.outcome
        layers = {age: tokens / o.wall_seconds for age, tokens in o.tokens_by_staleness.items()}
        waste = (o.dropped_tokens_l2 / o.wall_seconds, o.dropped_tokens_l3 / o.wall_seconds)
        panels.setdefault(one.policy, []).append(
            Bar(str(one.main_value), layers, *waste, f"max {o.max_staleness}")
        )
    return panels
