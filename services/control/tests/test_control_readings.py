"""The numbers that are read from a job's metrics endpoints, and the balance computed from them."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pipelinerl_common.metrics import PREPROCESSOR, TRAINER, Metrics, metrics_of
from pipelinerl_common.metrics.catalog import DROP_REASONS, STAGES
from pipelinerl_control import readings
from pipelinerl_control.balance import (
    LATE,
    LOST,
    WAITING,
    Balance,
    Counts,
    balance_between,
)
from pipelinerl_control.readings import READ, Reading, parse_metrics, read_metrics


def test_what_a_trainer_exports_is_read_back() -> None:
    metrics = Metrics(TRAINER, "sums", "default")
    metrics.gauge("policy_version").set(12)
    metrics.gauge("reward_mean").set(-0.25)
    metrics.gauge("ess").set(None)
    metrics.counter("samples_trained_total").inc(1.5e9)
    metrics.counter("trainer_phase_seconds_total").inc(3.5, phase="wait")
    metrics.counter("trainer_phase_seconds_total").inc(70, phase="train")
    values = parse_metrics(metrics.exposition())
    phases = {name: values.pop(name) for name in list(values) if name.startswith("trainer_phase")}
    assert values == {"policy_version": 12, "reward_mean": -0.25, "samples_trained_total": 1.5e9}
    assert phases["trainer_phase_seconds_total/wait"] == 3.5
    assert phases["trainer_phase_seconds_total/train"] == 70


def test_what_a_preprocessor_exports_is_read_back() -> None:
    metrics = Metrics(PREPROCESSOR, "sums", "default")
    metrics.gauge("queue_groups").set(3, stage="ready")
    metrics.counter("groups_dropped_total").inc(2, reason="stale")
    metrics.counter("samples_dropped_total").inc(9, reason="stale")
    values = parse_metrics(metrics.exposition())
    assert values["queue_groups/ready"] == 3
    assert values["groups_dropped_total/stale"] == 2
    assert values["groups_dropped_total/zero_advantage"] == 0
    assert not any("samples_dropped" in name for name in values), "it is not read"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "--1", "1e", "e", ".", "1 2 3", ""])
def test_what_is_no_number_is_passed_over(value: str) -> None:
    assert parse_metrics(
        f'# HELP x\npipelinerl_ess{{job="a"}} {value}\npipelinerl_lag_mean 2\n'.encode()
    ) == {"lag_mean": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-1.5", -1.5), ("1e-05", 1e-05), ("+2.5E3 1700000000000", 2500.0)],
)
def test_numbers_as_prometheus_writes_them(text: str, value: float) -> None:
    assert parse_metrics(f"pipelinerl_ess {text}\n".encode()) == {"ess": value}


def test_every_name_that_is_read_is_in_the_catalog() -> None:
    declared = {metric.name for role in (TRAINER, PREPROCESSOR) for metric in metrics_of(role)}
    assert declared >= READ
    assert set(DROP_REASONS) >= {*LATE, *LOST}
    assert set(STAGES) >= set(WAITING)


@pytest.fixture
def big_document() -> bytes:
    """Beyond one read of the socket, with what matters at its end."""
    return b"other_metric 1\n" * 100_000 + b"pipelinerl_policy_version 7\n"


async def test_a_document_that_comes_in_pieces_is_read_whole(big_document: bytes) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=big_document)

    readings = await _read(metrics)
    assert readings is not None
    assert readings.values == {"policy_version": 7}


async def test_a_document_without_end_and_a_server_at_odds_are_passed_over(
    big_document: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=big_document)

    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=503)

    assert await _read(broken) is None
    monkeypatch.setattr(readings, "MAX_BYTES", 1000)
    assert await _read(metrics) is None


async def _read(handler: Any) -> Reading | None:
    application = web.Application()
    application.router.add_get("/metrics", handler)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        return await read_metrics(session, f"{server.host}:{server.port}")


# the balance


def counts(at: float, step: int, actors: str = "ab", **values: float) -> Counts:
    trainer = Reading(
        at,
        {
            "policy_version": float(step),
            "trainer_phase_seconds_total/wait": values.pop("wait", 0.0),
        },
    )
    names = {
        name.replace("dropped_", "groups_dropped_total/"): value for name, value in values.items()
    }
    renamed = {name.replace("queue_", "queue_groups/"): value for name, value in names.items()}
    found = Counts.of(trainer, Reading(at, renamed), frozenset(actors), ("t", "p"))
    assert found is not None
    return found


def test_the_balance_of_generation_that_nothing_holds_up() -> None:
    """80 groups in 100 s, of them 16 of no use to anybody; the trainers waited for 60 s."""
    begin = counts(0.0, 10, groups_trained_total=100.0, dropped_failed=1.0)
    now = counts(
        100.0,
        20,
        groups_trained_total=164.0,
        dropped_zero_advantage=16.0,
        dropped_failed=9.0,
        wait=60.0,
    )
    balance = balance_between(begin, now)
    assert balance == Balance(10, 20, 2, r=0.8, r_gen=0.8, r_train=2.0)
    assert balance.ratio == 1.0


def test_the_balance_of_generation_that_is_held_up() -> None:
    """80 taken, 8 too late, and 32 more in the queue of which one batch of 8 always may be: 112
    groups, in the 70 of 100 s in which admission was open.
    """
    begin = counts(0.0, 10, queue_ready=4.0, queue_stream=1.0)
    now = counts(
        100.0,
        20,
        groups_trained_total=80.0,
        dropped_stale=5.0,
        dropped_ring_buffer=3.0,
        queue_ready=30.0,
        queue_stream=7.0,
        admission_closed_seconds_total=30.0,
    )
    balance = balance_between(begin, now)
    assert balance is not None
    assert (balance.r, balance.r_gen, balance.r_train) == pytest.approx((0.8, 1.6, 0.8))
    assert balance.ratio == pytest.approx(0.5)


def test_a_queue_that_is_worked_off_does_not_make_generation_slower() -> None:
    balance = balance_between(
        counts(0.0, 0, queue_ready=50.0), counts(10.0, 5, groups_trained_total=20.0)
    )
    assert balance is not None
    assert balance.ratio == 1.0


def test_without_a_step_there_is_no_balance() -> None:
    assert balance_between(counts(0.0, 3), counts(10.0, 3)) is None
    assert Counts.of(Reading(0.0, {}), Reading(0.0, {}), frozenset(), ()) is None


@pytest.mark.parametrize(
    "later",
    [
        counts(10.0, 9, groups_trained_total=50.0),
        counts(10.0, 11, groups_trained_total=0.0),
        counts(10.0, 11, actors="abc", groups_trained_total=50.0),
        counts(0.0, 11, groups_trained_total=50.0),
    ],
    ids=["a step back", "a new preprocessor", "another actor", "no time"],
)
def test_a_break_begins_anew(later: Counts) -> None:
    begin = counts(0.0, 10, groups_trained_total=40.0)
    assert not later.follows(begin)
    assert counts(10.0, 11, groups_trained_total=50.0).follows(begin)
