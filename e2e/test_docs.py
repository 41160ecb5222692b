"""The documentation site builds without a broken link, and what it says of the source is so."""

import ast
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pipelinerl_cli.__main__ import parse
from reference_pages import outdated_pages

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/pages"
MKDOCS = Path(sysconfig.get_path("scripts")) / "mkdocs"
ARCHITECTURE = PAGES / "explanation/architecture.md"


def test_the_site_builds_and_every_link_and_anchor_leads_somewhere(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            MKDOCS,
            "build",
            "--strict",
            "--config-file",
            ROOT / "docs/mkdocs.yml",
            "--site-dir",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "explanation/architecture/index.html").is_file()


def test_pages_made_from_the_source_are_up_to_date() -> None:
    assert outdated_pages() == [], "run python e2e/reference_pages.py"


@pytest.mark.parametrize(
    "page", ["README.md", ".github/CONTRIBUTING.md", "charts/pipelinerl/README.md"]
)
def test_links_of_pages_outside_the_site_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text)
    targets = [a or b for a, b in links if not (a or b).startswith(("http:", "https:", "mailto:"))]
    assert targets
    missing = [each for each in targets if not (ROOT / page).parent.joinpath(each).exists()]
    assert missing == []


def shown_commands() -> list[str]:
    """Lines that call `pipelinerl`, on the pages and in the README."""
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *PAGES.rglob("*.md")])
    return sorted(set(re.findall(r"^ *(pipelinerl .+)$", text, re.MULTILINE)))


def test_pages_show_commands() -> None:
    assert len(shown_commands()) >= 10


@pytest.mark.parametrize("command", shown_commands())
def test_every_command_that_the_pages_show_is_one(command: str) -> None:
    args = parse(shlex.split(command, comments=True)[1:])
    # A name of a job in a cluster, which only `watch` takes, is neither.
    subject = getattr(args, "subject", None)
    assert subject is None or subject.suffix == ".yaml" or re.search("/|DIR", str(subject))


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/pages/tutorials/first-job-in-a-cluster.md", "charts/pipelinerl/README.md"],
)
def test_every_installation_names_the_registry_of_the_images(page: str) -> None:
    """They are not published: without one no pod starts, and `--wait` ends with a timeout."""
    lines = re.findall(r"^ *helm install .+$", (ROOT / page).read_text(), re.MULTILINE)
    assert lines
    assert all("--set image.registry=" in line for line in lines)


def references() -> list[tuple[str, str]]:
    """`path/file.py:function` in the architecture page, as pairs."""
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", ARCHITECTURE.read_text())


def test_the_lives_of_a_sample_and_of_an_update_name_their_files_and_functions() -> None:
    assert len(references()) >= 15  # nine steps and six


@pytest.mark.parametrize("reference", references(), ids=":".join)
def test_every_function_that_the_architecture_page_names_exists(reference: tuple[str, str]) -> None:
    file, name = reference
    tree: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        found = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        assert found, f"{file} has no {name}"
        tree = found[0]
