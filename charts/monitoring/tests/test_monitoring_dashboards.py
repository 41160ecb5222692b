"""Panels have descriptions and query metrics that exist; the chart has the generated files."""

import json
import re
from typing import Any

import pytest

from monitoring.files import CHART, generated, main
from pipelinerl_common.metrics import CATALOG, Kind

HAS_NO_LIMIT = {"Step", "Reward", "Generated"}
"""Numbers that are good or bad only in comparison with another run."""


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path, panel)
        for path, text in generated().items()
        if path.startswith("dashboards/")
        for panel in json.loads(text)["panels"]
        if panel["type"] != "row"
    ]


def test_the_chart_has_what_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_file_that_was_changed_by_hand_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**generated(), "dashboards/overview.json": "{}"}
    monkeypatch.setattr("monitoring.files.generated", lambda: changed)
    assert main(["--check"]) == 1
    assert capsys.readouterr().err.startswith(
        "charts/pipelinerl/dashboards/overview.json: out of date"
    )


def test_every_panel_has_a_unit_a_description_and_its_place() -> None:
    for path, panel in panels():
        where = f"{path}: {panel['title']}"
        assert len(panel["description"]) > 20, where
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}, where
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, where
        if panel["type"] == "stat" and panel["title"] not in HAS_NO_LIMIT:
            assert len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1, where


def test_titles_are_unique_in_a_dashboard_and_queries_have_legends() -> None:
    by_page: dict[str, list[str]] = {}
    for path, panel in panels():
        by_page.setdefault(path, []).append(panel["title"])
        assert all(target["legendFormat"] for target in panel["targets"])
    assert len(by_page) == 5
    for path, titles in by_page.items():
        assert len(set(titles)) == len(titles), path


def test_queries_ask_for_metrics_that_exist_of_the_chosen_jobs() -> None:
    known = {
        f"{metric.series}{suffix}"
        for metric in CATALOG.values()
        for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
    }
    for path, panel in panels():
        for target in panel["targets"]:
            series = re.findall(r"(pipelinerl_\w+)(\{[^}]*\})?", target["expr"])
            assert series, panel["title"]
            for name, selector in series:
                assert name in known, f"{path}: {panel['title']}: {name}"
                of_operator = name.startswith("pipelinerl_operator_")
                assert of_operator or selector.startswith('{namespace=~"$namespace",job=~"$job"'), (
                    f"{path}: {panel['title']}"
                )


def test_every_dashboard_links_to_what_the_numbers_mean_which_is_there() -> None:
    assert (CHART.parents[1] / "docs" / "pages/explanation/staleness.md").is_file()
    for path, text in generated().items():
        if path.startswith("dashboards/"):
            assert json.loads(text)["links"][0]["url"] == "@docsUrl@/explanation/staleness.md"
