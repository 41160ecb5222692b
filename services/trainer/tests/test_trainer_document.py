"""The page algorithms.md is true: its table is that of the presets, and its examples are jobs."""

import re
from pathlib import Path
from typing import Any

import pytest
import trainer_fakes as fakes
import yaml

from pipelinerl_common.settings import parse_job
from pipelinerl_common.settings.algorithm import PRESETS

DOCUMENT = (Path(__file__).parents[3] / "docs/pages/explanation/algorithms.md").read_text(
    encoding="utf-8"
)
EXAMPLES: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
]


def number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def test_the_table_of_names_is_that_of_the_presets() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCUMENT.splitlines()
        if line.startswith("| `")
    ]
    documented = {
        row[0].strip("`"): row[1:8]
        for row in rows
        if row[0].strip("`") in PRESETS and len(row) == 9
    }
    expected = {}
    for name, preset in PRESETS.items():
        bounds = f"{number(preset.clip_low)} / {number(preset.clip_high)}"
        more = "dropZeroAdvantage" if preset.drop_zero_advantage else ""
        expected[name] = [
            preset.surrogate,
            preset.importance,
            bounds if preset.surrogate == "clip" else f"truncation {number(preset.truncation)}",
            preset.baseline,
            "yes" if preset.divide_by_std else "no",
            preset.normalize_by,
            more if preset.gae_lambda == 1 else f"gaeLambda {number(preset.gae_lambda)}",
        ]
    assert documented == expected


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[str(example["algorithm"]["loss"]) for example in EXAMPLES]
)
def test_every_example_is_a_job(example: dict[str, Any]) -> None:
    base = {"model": {"uri": "hf://organisation/model"}, "task": {"path": "my.tasks:Maths"}}
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "example"},
    }
    job = parse_job({**document, "spec": {**base, **example}}, "algorithms.md")
    for key, value in example["algorithm"].items():
        if not isinstance(value, dict):
            assert job.spec.algorithm.model_dump(by_alias=True)[key] == value


def test_there_are_examples_and_the_tests_that_are_named_exist() -> None:
    assert len(EXAMPLES) >= 8
    root = Path(__file__).parents[3]
    services = [root / "services" / name / "tests" for name in ("actor", "preprocessor")]
    folders = [Path(__file__).parent, *services, root / "e2e"]
    named = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", DOCUMENT)
    assert len(named) >= 8
    for name in named:
        assert any((folder / name).exists() for folder in folders), name
    assert set(fakes.ALGORITHMS) >= set(PRESETS)
