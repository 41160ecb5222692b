"""A run in which an actor and its generator leave and return while training continues."""

import json
import re
import signal
from collections.abc import Callable

import pytest

from pipelinerl_cli.__main__ import main
from test_e2e_run import assert_ended_without_leftovers, assert_nothing_trained_twice
from up_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ELASTIC = (
    *("--max-steps", "1000"),
    *("--set", "actors.generator.engine=transformers"),
    *("--set", "actors.maxReplicas=2"),
    *("--set", "algorithm.groupsPerStep=8"),
    *("--set", "staleness={policy: slack, eta: 2}"),
    # An actor that may be added is added, whatever the machine's balance is.
    *(
        "--set",
        "autoscale={enabled: true, schedule: hybrid, exploreSteps: 6, periodSteps: 6, lowRatio: "
        "0.01, highRatio: 0.02}",
    ),
)
LAG_BOUND = 2
"""The bound of the policy slack with eta=2."""
UPDATE = re.compile(r"\bupdate=(\d+) mode=staged checksum=(\w+)")


def starts(run: Run, name: str) -> int:
    return (run.output / "logs" / f"{name}.log").read_text().count(f"Z {name} starts\n")


def lives(run: Run, name: str) -> list[list[tuple[int, str]]]:
    """Updates (version, checksum) that a generator received, for each of its starts."""
    log = (run.output / "logs" / f"{name}.log").read_text()
    by_life = log.split(f"Z {name} starts\n")[1:]
    return [
        [(int(version), checksum) for version, checksum in UPDATE.findall(life)] for life in by_life
    ]


def published_groups(run: Run, name: str) -> list[float]:
    """A counter of the actor, record by record."""
    return [
        each["values"]["groups_published_total"] for each in run.records if each["instance"] == name
    ]


def test_an_actor_leaves_and_another_joins_while_training_goes_on(
    new_run: Callable[..., Run],
) -> None:
    run = new_run("elastic", *ELASTIC).start()
    run.wait_until(
        lambda: "actors 1 -> 2: trainers wait for samples" in run.terminal,
        "the choice of a second actor",
    )
    gone = published_groups(run, "actor-1")
    run.wait_until(
        lambda: published_groups(run, "actor-1")[len(gone) :][-1:] > [4.0],
        "groups of the new actor",
    )
    run.wait_for_step(len(run.steps) + 4)  # what it has published is trained
    run.signal(signal.SIGINT)
    assert run.wait(120) == 130, run.terminal[-4000:]
    assert_ended_without_leftovers(run)

    # what was chosen, and that nothing but the actor that went was touched
    assert re.findall(r"^actors \d -> \d", run.terminal, re.MULTILINE) == [
        "actors 2 -> 1",
        "actors 1 -> 2",
    ]
    assert gone[-1] > 0, "the first one had a part in it"
    assert run.summary["restarts"] == 0
    stay, come = (
        ("trainer-0", "preprocessor-0", "actor-0", "generator-0-0"),
        ("actor-1", "generator-1-0"),
    )
    assert [starts(run, name) for name in (*stay, *come)] == [1, 1, 1, 1, 2, 2]

    # nothing is lost, and nothing counts twice
    steps = run.summary["steps"]
    assert_nothing_trained_twice(run, steps)
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    admitted = [arguments[0] for _, method, arguments, _ in events if method == "admitted"]
    trained = {group["group_id"] for line in run.trained for group in line["groups"]}
    assert len(set(admitted)) == len(admitted)
    assert trained <= set(admitted)
    dropped = {
        reason: count
        for reason, count in run.summary["dropped_groups"].items()
        if reason != "zero_advantage"
    }
    assert set(dropped) <= {"stale", "cancelled"}, (
        "an actor that leaves hands back what it has begun"
    )
    assert set(run.summary["rollout_errors"]) <= {"generator_away"}, "it is not ready at once"
    assert main(["replay", str(run.output)]) == 0

    # the bound holds, and the new actor had the right weights
    assert max(step["lag_max"] for step in run.steps) <= LAG_BOUND
    (stayed,), (first, second) = lives(run, "generator-0-0"), lives(run, "generator-1-0")
    known = dict(stayed)
    assert len(first) > 2
    assert len(second) > 2
    assert all(known[version] == checksum for version, checksum in first + second)
    versions = [version for version, _ in second]
    assert versions == sorted(versions)
    assert versions[0] > first[-1][0]
