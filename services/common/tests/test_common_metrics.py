"""The catalog's rules, what a process may record, and that Prometheus and the run's records read
the same numbers.
"""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics_page import metrics_page
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import (
    CATALOG,
    ROLES,
    TABLES,
    Kind,
    Metric,
    Metrics,
    UndeclaredMetric,
    exposition_of,
    metrics_of,
    serve_metrics,
)
from pipelinerl_common.metrics.registry import MAX_LABEL_VALUES


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By series and labels, without job and role."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("job", "role"))),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_name_is_declared_once() -> None:
    assert len(CATALOG) == sum(map(len, TABLES.values()))


@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG.keys())
def test_a_row_follows_prometheus_rules(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")
    assert metric.unit
    assert metric.roles
    assert set(metric.roles) <= set(ROLES)
    assert not {"job", "role", "le", "instance", "pod"} & set(metric.labels)
    assert len(metric.labels) <= 2
    assert not metric.name.endswith(("_ms", "_mb", "_kb", "_percent", "_minutes"))


def test_the_same_number_is_in_the_series_and_in_the_record() -> None:
    metrics = Metrics("preprocessor", "sums")
    metrics.counter("groups_trained_total").inc(32)
    metrics.counter("groups_dropped_total").inc(3, reason="stale")
    metrics.gauge("queue_groups").set(7, stage="ready")
    metrics.gauge("served_version").read(lambda: 4.0)
    record, series = metrics.values(), samples(metrics)
    assert record["groups_trained_total"] == series["pipelinerl_groups_trained_total", ()] == 32
    stale = (("reason", "stale"),)
    assert (
        record["groups_dropped_total{reason=stale}"]
        == series["pipelinerl_groups_dropped_total", stale]
        == 3
    )
    assert (
        record["queue_groups{stage=ready}"]
        == series["pipelinerl_queue_groups", (("stage", "ready"),)]
        == 7
    )
    assert record["served_version"] == series["pipelinerl_served_version", ()] == 4
    assert (
        'pipelinerl_groups_trained_total{job="sums",role="preprocessor"} 32.0'
        in metrics.exposition().decode()
    )


def test_counters_begin_at_zero_for_what_is_known_beforehand() -> None:
    metrics = Metrics("preprocessor", "sums")
    stale = metrics.counter("stale_groups_total")
    metrics.counter("groups_trained_total")
    assert samples(metrics) == {
        ("pipelinerl_stale_groups_total", (("layer", "running"),)): 0,
        ("pipelinerl_stale_groups_total", (("layer", "assembly"),)): 0,
        ("pipelinerl_groups_trained_total", ()): 0,
    }
    assert metrics.values() == {"groups_trained_total": 0}, (
        "records leave out reasons that never were"
    )
    stale.inc(layer="running")
    assert metrics.values() == {"groups_trained_total": 0, "stale_groups_total{layer=running}": 1}


def test_totals_that_are_counted_elsewhere_are_read_or_reached() -> None:
    metrics = Metrics("coordinator", "sums")
    updates, expulsions = (
        metrics.counter("updates_coordinated_total"),
        metrics.counter("member_expulsions_total"),
    )
    updates.read(lambda: 5.0, outcome="published")
    expulsions.reach(3)
    expulsions.reach(2)
    assert metrics.values() == {
        "updates_coordinated_total{outcome=published}": 5,
        "member_expulsions_total": 3,
    }


def test_several_jobs_of_one_process_share_their_families() -> None:
    jobs = [Metrics("coordinator", name) for name in ("sums", "maths")]
    for metrics in jobs:
        metrics.gauge("transfer_group_members").set(2)
    text = b"".join(exposition_of(jobs)).decode()
    assert text.count("# TYPE pipelinerl_transfer_group_members gauge") == 1
    assert {
        sample.labels["job"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    } == {
        "sums",
        "maths",
    }


def test_jobs_of_one_name_in_two_namespaces_have_series_of_their_own() -> None:
    processes = [Metrics("coordinator", "sums", namespace) for namespace in ("lab", "prod")]
    for number, each in enumerate(processes):
        each.gauge("generators_absent").set(number)
    assert [
        line
        for line in b"".join(exposition_of(processes)).decode().splitlines()
        if not line.startswith("#")
    ] == [
        'pipelinerl_generators_absent{job="sums",namespace="lab",role="coordinator"} 0.0',
        'pipelinerl_generators_absent{job="sums",namespace="prod",role="coordinator"} 1.0',
    ]


def test_the_metrics_of_many_jobs_are_made_one_after_the_other_and_none_is_kept() -> None:
    """An operator of a thousand jobs would hold them all, and those of several scrapes until a full
    garbage collection.
    """
    alive: weakref.WeakSet[Metrics] = weakref.WeakSet()

    def make() -> Iterator[Metrics]:
        for number in range(5):
            assert len(alive) <= 1
            metrics = Metrics("trainer", f"job-{number}")
            alive.add(metrics)
            metrics.gauge("policy_version").set(number)
            yield metrics

    gc.disable()
    try:
        text = b"".join(exposition_of(make()))
        assert not alive
    finally:
        gc.enable()
    assert text.count(b"\npipelinerl_policy_version{") == 5


def test_the_metrics_of_very_many_jobs_are_as_complete_as_those_of_few() -> None:
    jobs = [Metrics("trainer", f"job-{number}") for number in range(100)]
    for metrics in jobs[:2] + jobs[70:]:
        metrics.gauge("policy_version").set(7)
    text = b"".join(exposition_of(jobs)).decode()
    assert text.count("# TYPE pipelinerl_policy_version gauge") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["pipelinerl_policy_version"].samples
    assert [sample.labels["job"] for sample in samples] == [
        f"job-{number}" for number in (0, 1, *range(70, 100))
    ]


def test_a_gauge_without_a_value_is_missing() -> None:
    metrics = Metrics("trainer", "sums")
    norm = metrics.gauge("grad_norm")
    assert metrics.values() == {}
    norm.set(0.5)
    assert metrics.values() == {"grad_norm": 0.5}
    norm.set(None)
    assert metrics.values() == {}
    norm.read(lambda: None)
    assert "pipelinerl_grad_norm{" not in metrics.exposition().decode()


def test_a_histogram_counts_weighted_values_at_and_below_each_bound() -> None:
    metrics = Metrics("trainer", "sums")
    lags = metrics.histogram("lag_steps")
    lags.observe(0, 100)
    lags.observe(2, 50)
    lags.observe(40, 10)
    series, record = samples(metrics), metrics.values()
    expected = {"0": 100, "1": 100, "2": 150, "15": 150}
    for bound, count in expected.items():
        assert record[f"lag_steps_bucket{{le={bound}}}"] == count
        assert series["pipelinerl_lag_steps_bucket", (("le", bound),)] == count
    assert (
        series["pipelinerl_lag_steps_bucket", (("le", "+Inf"),)] == record["lag_steps_count"] == 160
    )
    assert (
        series["pipelinerl_lag_steps_sum", ()]
        == record["lag_steps_sum"]
        == 0 * 100 + 2 * 50 + 40 * 10
    )


@pytest.mark.parametrize(
    ("role", "kind", "name", "message"),
    [
        ("trainer", "gauge", "no_such_thing", "not in the catalog"),
        ("trainer", "counter", "ess", "a gauge of trainer"),
        ("actor", "gauge", "ess", "not as a gauge of actor"),
    ],
)
def test_what_the_catalog_does_not_have_cannot_be_recorded(
    role: str, kind: str, name: str, message: str
) -> None:
    with pytest.raises(UndeclaredMetric, match=message):
        getattr(Metrics(role, "sums"), kind)(name)


def test_labels_are_those_of_the_catalog() -> None:
    drops = Metrics("preprocessor", "sums").counter("groups_dropped_total")
    with pytest.raises(UndeclaredMetric, match="group_id"):
        drops.inc(group_id="0-1")


def test_label_values_from_elsewhere_are_bounded() -> None:
    metrics = Metrics("actor", "sums")
    errors = metrics.counter("rollout_errors_total")
    for number in range(10 * MAX_LABEL_VALUES):
        errors.inc(reason=f"invented_{number}")
    values = metrics.values()
    assert len(values) <= MAX_LABEL_VALUES + 1
    assert sum(values.values()) == 10 * MAX_LABEL_VALUES
    assert values["rollout_errors_total{reason=other}"] > 8 * MAX_LABEL_VALUES


def test_every_role_but_the_operator_has_metrics() -> None:
    assert all(metrics_of(role) for role in ROLES if role != "operator")


async def test_metrics_are_served_over_http() -> None:
    metrics = Metrics("trainer", "sums")
    metrics.gauge("ess").set(0.75)
    async with serve_metrics("127.0.0.1:0", metrics.exposition, lambda: b"more 1\n") as address:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/metrics") as response,
        ):
            text = await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
        assert 'pipelinerl_ess{job="sums",role="trainer"} 0.75' in text
        assert text.endswith("more 1\n")
        with pytest.raises(SettingsError, match="cannot listen"):
            async with serve_metrics(address, metrics.exposition):
                pass


async def test_without_an_address_nothing_is_served() -> None:
    async with serve_metrics("", lambda: b"") as address:
        assert address == ""


def test_the_documentation_is_the_catalog() -> None:
    page = Path(__file__).parents[3] / "docs/pages/reference/metrics.md"
    assert page.read_text() == metrics_page(), "run python e2e/reference_pages.py"
