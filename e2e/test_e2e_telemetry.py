"""One short run of all services, scraped and traced: it exports what the catalog lists, and the
traces are those that the docs describe.
"""

import json
import signal
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.collector import Collector, ReceivedSpan, collecting
from pipelinerl_common.metrics import PREFIX, metrics_of
from up_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

DEADLINE_S = 600.0
STEPS = 3
WITH_REFERENCE = (
    *("--set", "reference={generator: {engine: transformers}}"),
    *("--set", "algorithm.kl.coefficient=0.01"),
    *("--set", "actors.generator.engine=transformers"),
    *("--set", "algorithm.groupsPerStep=8"),
    *("--set", "trainers.processesPerNode=2"),
    *("--set", "staleness={policy: slack, eta: 2}"),
)

NOT_IN_THIS_RUN = {
    "kv_cache_usage_ratio": "the transformers engine has no blocks",
    "engine_kv_usage_ratio": "nor has any other",
    "value_error": "there is no value head",
    "autoscale_ratio": "nothing scales",
}
"""Metrics that are catalogued and declared, and have no value in this run."""


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, str], Collector, Path]]:
    """The metrics that every process exported after some steps, by target name, and all spans once
    the run has ended.
    """
    folder = tmp_path_factory.mktemp("telemetry")
    with collecting() as (endpoint, collector):
        tracing = f"telemetry.tracing={{endpoint: '{endpoint}', sampleRatio: 1.0}}"
        run = Run(folder / "run", (*WITH_REFERENCE, "--set", tracing)).start()
        try:
            run.wait_until(lambda: len(run.steps) >= STEPS, f"step {STEPS}", DEADLINE_S)
            pages = _scrape(run.output)
            run.signal(signal.SIGINT)
            run.wait(DEADLINE_S)
        finally:
            if run.process is not None and run.process.poll() is None:
                run.process.kill()
                run.process.wait(30)
        yield pages, collector, run.output


def _scrape(output: Path) -> dict[str, str]:
    pages = {}
    for target in json.loads((output / "metrics-targets.json").read_text()):
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=60) as answer:
            pages[target["labels"]["instance"]] = answer.read().decode()
        assert f'role="{target["labels"]["role"]}"' in pages[target["labels"]["instance"]]
    return pages


ROLES = {
    "up": "coordinator",
    "preprocessor-0": "preprocessor",
    "generator-0-0": "generator",
    "reference-0": "reference",
    "trainer-0": "trainer",
    "actor-0": "actor",
}


@pytest.mark.parametrize("name", ROLES)
def test_a_process_exports_what_the_catalog_says_and_nothing_else(
    observed: tuple[dict[str, str], Collector, Path], name: str
) -> None:
    families = {family.name: family for family in text_string_to_metric_families(observed[0][name])}
    ours = {family for family in families if family.startswith(PREFIX)}
    declared = {metric.series.removesuffix("_total"): metric for metric in metrics_of(ROLES[name])}
    assert ours == set(declared)
    empty = {
        declared[family].name
        for family in ours
        if not families[family].samples and not declared[family].labels
    }
    assert empty <= set(NOT_IN_THIS_RUN)


def test_two_ranks_report_once(observed: tuple[dict[str, str], Collector, Path]) -> None:
    pages = observed[0]
    assert [name for name in pages if name.startswith("trainer")] == ["trainer-0"]
    values = {
        sample.name: sample.value
        for f in text_string_to_metric_families(pages["trainer-0"])
        for sample in f.samples
    }
    assert values["pipelinerl_optimizer_steps_total"] >= STEPS
    assert (
        values["pipelinerl_samples_trained_total"]
        == values["pipelinerl_optimizer_steps_total"] * 8 * 8
    )
    assert values["pipelinerl_tokens_trained_total"] == values["pipelinerl_lag_steps_count"] > 0


def test_stages_hold_what_the_ledger_lets_out(
    observed: tuple[dict[str, str], Collector, Path],
) -> None:
    page = observed[0]["preprocessor-0"]
    families = {family.name: family for family in text_string_to_metric_families(page)}
    depths = {
        sample.labels["stage"]: sample.value
        for sample in families["pipelinerl_queue_groups"].samples
    }
    assert set(depths) == {"admitted", "running", "stream", "ready", "packed"}
    [limit] = families["pipelinerl_outstanding_limit_groups"].samples
    assert 0 < sum(depths.values()) <= limit.value + 8, "what is packed has left the policy"


def test_a_group_is_one_trace_from_its_grant_to_the_step_that_is_linked_to_it(
    observed: tuple[dict[str, str], Collector, Path],
) -> None:
    collector = observed[1]
    by_id = {span.id: span for span in collector.spans}
    steps = collector.named("optimizer step")
    assert len(steps) >= STEPS
    for step in steps[:STEPS]:
        assert (step.parent, len(step.links)) == ("", 8)
        assert {child.name for child in collector.children(step)} >= {"train", "commit"}
        for link in step.links:
            assert [span.name for span in _ancestry(by_id[link], by_id)] == [
                "pack",
                "preprocess",
                "publish",
                "rollout",
                "grant",
            ]
    packed = by_id[steps[0].links[0]]
    trace = [span for span in collector.spans if span.trace == packed.trace]
    services = {span.name: span.service.removeprefix("pipelinerl-") for span in trace}
    assert services == {
        "grant": "preprocessor",
        "rollout": "actor",
        "generate": "actor",
        "decode": "generator",
        "verify": "actor",
        "publish": "actor",
        "preprocess": "preprocessor",
        "score": "preprocessor",
        "pack": "preprocessor",
    }
    starts: dict[str, int] = defaultdict(int)
    for span in trace:
        starts[span.name] = max(starts[span.name], span.start)
    order = ["grant", "rollout", "generate", "verify", "publish", "preprocess", "pack"]
    assert sorted(order, key=lambda name: starts[name]) == order


def test_a_weight_update_is_a_trace_with_a_span_per_generator(
    observed: tuple[dict[str, str], Collector, Path],
) -> None:
    collector = observed[1]
    updates = [span for span in collector.named("weight update") if collector.children(span)]
    assert updates
    for update in updates[:2]:
        assert update.parent == ""
        assert {child.name for child in collector.children(update)} == {
            "send weights",
            "update generators",
        }
        [fan_out] = [
            child for child in collector.children(update) if child.name == "update generators"
        ]
        [generator] = collector.children(fan_out)
        assert (generator.name, generator.attributes["generator"]) == (
            "update generator",
            "generator-0-0",
        )
        [received] = collector.children(generator)
        assert (received.name, received.service) == ("receive weights", "pipelinerl-generator")
        assert received.attributes["pause_s"] > 0


def test_log_lines_of_steps_carry_the_trace(
    observed: tuple[dict[str, str], Collector, Path],
) -> None:
    traces = {span.trace for span in observed[1].named("optimizer step")}
    lines = (observed[2] / "logs" / "trainer-0.log").read_text().splitlines()
    steps = [line for line in lines if " step=" in line and "reward_mean" in line]
    assert len(steps) >= STEPS, "one line per step"
    assert all(line.rpartition(" trace=")[2] in traces for line in steps[:STEPS])


def _ancestry(span: ReceivedSpan, by_id: dict[str, ReceivedSpan]) -> Iterator[ReceivedSpan]:
    yield span
    if span.parent:
        yield from _ancestry(by_id[span.parent], by_id)
