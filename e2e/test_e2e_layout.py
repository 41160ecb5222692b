"""The repository keeps its shape: the files at the top, folders that must not be packages, and
packages that import nothing heavy.
"""

import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "docs",
    "README.md", "LICENSE", "pyproject.toml", "services", "proto", "charts", "operator", "e2e",
    "Dockerfile.actor", "Dockerfile.trainer",
}  # fmt: skip


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in listing.stdout.splitlines()]


def test_the_top_level_is_fixed() -> None:
    top = {path.parts[0] for path in tracked_files()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.itemgetter(1)([1, 2]) == 2
    assert str(ROOT) not in str(operator.__file__)


@pytest.mark.parametrize("file", ["e2e/environment", "Dockerfile.actor", "Dockerfile.trainer"])
def test_every_extra_that_is_installed_exists(file: str) -> None:
    """pip only warns of an extra that does not exist, and installs the rest."""
    with (ROOT / "pyproject.toml").open("rb") as project:
        extras = set(tomllib.load(project)["project"]["optional-dependencies"])
    text = (ROOT / file).read_text()
    named = {
        name for group in re.findall(r"\$root\[([a-z,]+)\]", text) for name in group.split(",")
    }
    named |= set(re.findall(r"o\['([a-z]+)'\]", text))
    assert named
    assert named <= extras


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in tracked_files() if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "module",
    ["pipelinerl_common.settings", "pipelinerl_staleness.registry", "pipelinerl_control.plan"],
)
def test_light_packages_import_without_heavy_ones(module: str) -> None:
    code = (
        f"import {module}, sys; print([m for m in ('torch', 'vllm', 'transformers', "
        "'deepspeed') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "pipelinerl_cli",
        "pipelinerl_preprocessor",
        "pipelinerl_trainer",
        "pipelinerl_actor.rollout",
        "pipelinerl_actor.generator",
        "pipelinerl_actor.prepare",
    ],
)
def test_help_comes_without_heavy_imports(module: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['{module}', '--help']\n"
        f"try: runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = [m for m in ('torch', 'vllm', 'transformers', 'deepspeed') if m in sys.modules]; "
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
