"""Judgements: their levels, and that no limit of theirs stands anywhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl_common import judgements
from pipelinerl_common.judgements import ESS, LAG, RESTARTS, Judgement, Severity
from pipelinerl_common.metrics import CATALOG

ROOT = Path(__file__).parents[3]
JUDGES = [
    *(ROOT / "services/cli/pipelinerl_cli/doctor").glob("*_rules.py"),
    *(ROOT / "charts/monitoring").glob("*.py"),
]
JUDGEMENTS = {name: each for name, each in vars(judgements).items() if isinstance(each, Judgement)}
NOT_A_LIMIT = {0, 1, 2}
"""None, one and a pair."""
NO_LIMITS_THERE = {
    ("learning_rules.py", 0.5),  # whether prompts are too hard or too easy
    ("fault_rules.py", 0.25),  # quarters of a run's time
    ("fault_rules.py", 0.5),
    ("fault_rules.py", 0.75),
}


def test_every_judgement_is_on_a_metric_that_exists() -> None:
    assert {each.metric for each in JUDGEMENTS.values()} <= CATALOG.keys()


def test_an_alarm_is_never_stricter_than_the_limit() -> None:
    for name, each in JUDGEMENTS.items():
        assert each.alarm != each.limit, name
        assert each.is_beyond(each.alarm_limit) == (each.alarm is not None), name


def test_ess_is_a_warning_below_its_limit_and_critical_below_its_alarm() -> None:
    assert [ESS.is_beyond(value) for value in (0.81, 0.8, 0.79, float("nan"))] == [
        False,
        False,
        True,
        False,
    ]
    assert (ESS.severity_of(0.6), ESS.severity_of(0.49)) == (Severity.WARNING, Severity.CRITICAL)


def test_a_judgement_without_an_alarm_has_one_level() -> None:
    assert (LAG.is_beyond(8.0), LAG.is_beyond(8.1), LAG.alarm_limit) == (False, True, 8)
    assert LAG.severity_of(100.0) is Severity.WARNING
    assert (RESTARTS.is_beyond(1), RESTARTS.alarm_limit) == (True, 3)


def limits(path: Path) -> Iterator[str]:
    """Numbers that a module compares with, or makes a panel's or an alert's limit of."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        numbers: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            numbers = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Limit":
            numbers = [*node.args, *(each.value for each in node.keywords)]
        for number in numbers:
            if (
                isinstance(number, ast.Constant)
                and type(number.value) in (int, float)
                and number.value not in NOT_A_LIMIT
                and (path.name, number.value) not in NO_LIMITS_THERE
            ):
                yield f"{path.name}:{number.lineno}: {number.value!r}"


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: path.name)
def test_no_limit_stands_outside_the_catalogue(path: Path) -> None:
    assert list(limits(path)) == []
