"""What is printed when a run has ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl_common.words import counted


def print_outcome(summary: Mapping[str, Any], root: Path, failure: str | None) -> None:
    if failure is not None:
        print(f"the run failed: {failure}")
        print(f"logs: {root / 'logs'}")
    if summary["steps"]:
        print(_line(summary))
        for line in evaluation_lines(summary):
            print(line)
    if summary["status"] == "interrupted":
        print("stopped; the same command goes on with the run")
    print(f"report: {root / 'report.html'}")


def _line(summary: Mapping[str, Any]) -> str:
    restarts = f", {counted(summary['restarts'], 'restart')}" if summary["restarts"] else ""
    updates = counted(summary["weight_updates"], "in-flight update")
    return (
        f"{counted(summary['steps'], 'step')} in {shown(summary['training_seconds'], '.0f')} s of "
        "training, "
        f"{shown(summary['seconds'], '.0f')} s in all: "
        f"reward {shown(summary['reward_first'], '.3f')} -> "
        f"{shown(summary['reward_last'], '.3f')}, "
        f"{updates} (pause {shown(summary['pause_seconds_mean'], '.3f')} s mean), "
        f"lag {shown(summary['lag_mean'], '.2f')} mean {shown(summary['lag_max'], '.0f')} max, "
        f"ESS {shown(summary['ess_mean'], '.3f')}, {shown(summary['tokens_per_second'], ',.0f')} "
        f"tokens/s mean{restarts}"
    )


def evaluation_lines(summary: Mapping[str, Any]) -> list[str]:
    """Example: "held-out: pass@1 0.210 -> 0.812 (0.766 to 0.853) at step 60"."""
    lines = []
    for name, each in summary.get("evaluation", {}).items():
        parts = []
        for k, now in each["pass_at"].items():
            before = each["first"]["pass_at"].get(k, {}).get("mean")
            began = f"{shown(before, '.3f')} -> " if each["first"]["step"] != each["step"] else ""
            parts.append(
                f"pass@{k} {began}{shown(now['mean'], '.3f')} ({shown(now['low'], '.3f')} to "
                f"{shown(now['high'], '.3f')})"
            )
        lines.append(f"{name}: {', '.join(parts)} at step {each['step']}")
    return lines


def shown(value: float | None, form: str) -> str:
    """Example: shown(0.1234, ".2f") is "0.12"; shown(None, ".2f") is "-"."""
    return "-" if value is None else format(value, form)
