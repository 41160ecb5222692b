"""One real run, made stale on purpose, under a real Prometheus: every panel has data, the lag alert
fires with its number.

Weights are published after every eighth step only, so that tokens are trained up to seven steps
after they were sampled.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

import prometheus_server
from monitoring.alert import with_thresholds
from monitoring.files import CHART, prometheus_rules, thresholds
from pipelinerl_common.metrics import CATALOG, serve_metrics
from pipelinerl_operator.controller.telemetry import Telemetry
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import WorkQueue
from prometheus_server import Prometheus
from up_run import Run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(prometheus_server.PROMETHEUS is None, reason=prometheus_server.MISSING),
]

STEPS_PER_PUBLISH = 8
LAG_LIMIT = 2
STALE = ("--set", f"staleness={{policy: conventional, stepsPerGeneration: {STEPS_PER_PUBLISH}}}")
TASK = "pipelinerl_actor.tasks.arithmetic:Arithmetic"
HELD_OUT = (
    f"{{name: held-out, path: '{TASK}', args: {{digits: 1}}, numPrompts: 8, samplesPerPrompt: 2}}"
)
EVALUATED = (
    "--set",
    f"evaluation={{everySteps: 10, generator: {{engine: transformers}}, sets: [{HELD_OUT}]}}",
)
WITHOUT_DATA = {
    "pipelinerl_kl_ref": "the job has no reference model",
    "pipelinerl_autoscale_ratio": "the operator computes it, for jobs that scale by themselves",
}
"""Series that this run cannot have, and the reason."""


@dataclass(frozen=True)
class Monitored:
    """A run that has ended, and Prometheus with its series."""

    run: Run
    prometheus: Prometheus
    start: float
    end: float
    lag_alert: dict[str, Any]
    """The alert while it fired."""

    def series(self, query: str) -> list[dict[str, Any]]:
        return self.prometheus.series(query, self.start, self.end)


@contextmanager
def operator_metrics() -> Iterator[str]:
    """Serves the metrics of an operator: a leader that keeps reconciling one job."""
    ready, stop = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        telemetry = Telemetry(is_leader=lambda: True)
        queue: WorkQueue = WorkQueue()
        telemetry.watch_queue(queue)
        telemetry.watch_informers(cast(Any, [SimpleNamespace(silence_s=1.0, restarts=0)]))
        body = {
            "metadata": {"name": "sums", "namespace": "lab", "uid": "1", "resourceVersion": "1"},
            "status": {"phase": "Running"},
        }
        telemetry.watch_jobs(lambda: [JobView.of(body)])
        async with serve_metrics("127.0.0.1:0", lambda: b"".join(telemetry.exposition())) as where:
            address.append(where)
            ready.set()
            while not stop.is_set():
                telemetry.called("get", 200, 0.01)
                telemetry.reconciled("done", 0.01)
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield address[0]
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    root = tmp_path_factory.mktemp("monitored")
    run = Run(root / "run", ("--max-steps", str(3 * STEPS_PER_PUBLISH), *STALE, *EVALUATED))
    values: dict[str, float | str] = {
        **thresholds(),
        "lagSteps": LAG_LIMIT,
        "runbooksUrl": "https://docs.example/runbooks.md",
    }
    rules = yaml.safe_load(with_thresholds(yaml.safe_dump(prometheus_rules()), values))
    (lag,) = (
        rule
        for group in rules["groups"]
        for rule in group["rules"]
        if rule["alert"] == "PipelineRLLagHigh"
    )
    lag["for"] = "0s"
    with operator_metrics() as operator:
        scrape: list[dict[str, Any]] = [
            {
                "job_name": "pipelinerl",
                "honor_labels": True,
                "file_sd_configs": [
                    {"files": [str(run.output / "metrics-targets.json")], "refresh_interval": "1s"}
                ],
            },
            {"job_name": "operator", "static_configs": [{"targets": [operator]}]},
        ]
        with prometheus_server.running(root / "prometheus", scrape, rules) as prometheus:
            run.start()
            try:
                seen: list[dict[str, Any]] = []

                def lag_alert_fires() -> bool:
                    alerts = prometheus.alerts()
                    seen.extend(
                        each
                        for each in alerts
                        if each["labels"]["alertname"] == "PipelineRLLagHigh"
                    )
                    return any(each["state"] == "firing" for each in seen)

                run.wait_until(lag_alert_fires, "lag alert", timeout_s=600)
                assert run.wait(600) == 0, run.terminal[-4000:]
            finally:
                if run.process is not None and run.process.poll() is None:
                    run.process.kill()
                    run.process.wait(30)
            start, end = run.records[0]["time"], run.records[-1]["time"]
            firing = next(each for each in seen if each["state"] == "firing")
            yield Monitored(run, prometheus, start, end, firing)


def panels() -> list[tuple[str, dict[str, Any]]]:
    files = sorted((CHART / "dashboards").glob("*.json"))
    return [
        (file.stem, panel)
        for file in files
        for panel in json.loads(file.read_text())["panels"]
        if panel["type"] != "row"
    ]


def test_every_panel_of_every_dashboard_has_data(monitored: Monitored) -> None:
    empty = []
    for page, panel in panels():
        for target in panel["targets"]:
            query = (
                target["expr"]
                .replace("$namespace", ".*")
                .replace("$job", ".*")
                .replace("$__rate_interval", "10s")
            )
            numbers = [
                value
                for series in monitored.series(query)
                for _, value in series["values"]
                if value != "NaN"
            ]
            if not numbers and not any(series in query for series in WITHOUT_DATA):
                empty.append(f"{page}: {panel['title']}: {query}")
    assert empty == []


def test_the_choices_of_the_dashboards_are_filled(monitored: Monitored) -> None:
    jobs = monitored.prometheus.get(
        "label/job/values", **{"match[]": 'pipelinerl_memory_bytes{job!=""}'}
    )
    assert jobs == [monitored.run.job.stem]


def test_the_lag_alert_fired_with_its_number(monitored: Monitored) -> None:
    alert = monitored.lag_alert
    assert alert["labels"] == {
        "alertname": "PipelineRLLagHigh",
        "job": monitored.run.job.stem,
        "severity": "warning",
    }
    assert LAG_LIMIT < float(alert["value"]) <= STEPS_PER_PUBLISH - 1
    assert alert["annotations"]["summary"] == "arithmetic trains old tokens"
    assert (
        f"are trained {float(alert['value']):.4g} steps after"
        in alert["annotations"]["description"]
    )
    assert f"(limit {LAG_LIMIT})" in alert["annotations"]["description"]
    assert (
        alert["annotations"]["runbook_url"] == "https://docs.example/runbooks.md#pipelinerllaghigh"
    )


def test_no_other_alert_fired(monitored: Monitored) -> None:
    fired = {
        each["metric"]["alertname"] for each in monitored.series('ALERTS{alertstate="firing"}')
    }
    assert fired == {"PipelineRLLagHigh"}


def test_prometheus_saw_what_the_run_wrote_down(monitored: Monitored) -> None:
    steps = {step: values["lag_mean"] for step, values in enumerate(monitored.run.steps, start=1)}
    seen = {
        float(value)
        for each in monitored.series("pipelinerl_lag_mean")
        for _, value in each["values"]
    }
    assert seen
    for value in seen:
        assert any(abs(value - mean) < 1e-6 for mean in steps.values()), (value, steps)
    assert max(steps.values()) > LAG_LIMIT


def test_every_scraped_series_is_in_the_list_of_metrics(monitored: Monitored) -> None:
    names: list[str] = monitored.prometheus.get("label/__name__/values")
    known = {metric.series for metric in CATALOG.values()}
    ours = {name for name in names if name.startswith("pipelinerl_")}
    assert {
        name for name in ours if name not in known and name.rpartition("_")[0] not in known
    } == set()
    roles = monitored.prometheus.get("label/role/values")
    assert {"actor", "coordinator", "evaluator", "generator", "preprocessor", "trainer"} <= set(
        roles
    )
