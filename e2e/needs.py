"""A plugin of pytest that marks every test by what it needs, so that a tier can be chosen with -m.

A test needs `torch` when its file, or anything that the file imports, imports torch. It needs
`processes` when its file or a helper of it starts some: nats-server, a service, a shell. The
markers `vllm`, `e2e` and `cluster` are written at the tests themselves, because only their authors
know. What has no marker needs nothing but Python: those are the tests of `e2e/test fast`.

`--without torch` leaves whole files out before they are imported, which -m cannot do. `--lane`
divides a session in two: `shared` for tests that may run two at a time, `alone` for those that want
the whole machine (vLLM, whole runs, a cluster).
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "deepspeed", "vllm", "safetensors", "peft"}
STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|create_subprocess_exec|NatsServer|pytester)\b|_harness import"
)
ALONE = ("vllm", "e2e", "cluster", "gpu")
IMPORT = re.compile(r"^(?:from (\S+) import ([^#\n(]+|\([^)]*\))|import (\S+))", re.MULTILINE)
LINES = {
    "torch": "torch: imports torch (slow to load)",
    "processes": "processes: starts servers or services as processes",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=list(LINES),
        help="leave out what needs it",
    )
    parser.addoption("--lane", choices=["shared", "alone"], help="tests that may share the machine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return bool(needs_of(collection_path) & set(config.getoption("--without"))) or None


def pytest_configure(config: pytest.Config) -> None:
    for line in LINES.values():
        config.addinivalue_line("markers", line)


# First, so that -m sees the markers: deselection happens in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for need in needs_of(item.path):
            item.add_marker(need)
    if lane := config.getoption("--lane"):
        other = [item for item in items if _is_alone(item) != (lane == "alone")]
        items[:] = [item for item in items if _is_alone(item) == (lane == "alone")]
        config.hook.pytest_deselected(items=other)


def _is_alone(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ALONE)


@cache
def needs_of(test_file: Path) -> frozenset[str]:
    """Names of the markers that all tests of this file get."""
    files = _with_imports(test_file)
    tests = {file for file in files if _is_test_code(file)}
    return frozenset(
        need
        for need, is_needed in {
            "torch": any(_imported(file) & HEAVY for file in files),
            "processes": any(STARTS_PROCESSES.search(_text(file)) for file in tests),
        }.items()
        if is_needed
    )


def _with_imports(start: Path) -> set[Path]:
    """The file, its folder's conftest, and every file of the project that they import."""
    found: set[Path] = set()
    waiting = [start, start.with_name("conftest.py")]
    while waiting:
        file = waiting.pop()
        if file not in found and file.is_file():
            found.add(file)
            waiting += [path for name in _imported(file) if (path := _files().get(name))]
    return found


@cache
def _imported(file: Path) -> frozenset[str]:
    """Dotted names of what the file imports at its top, and of the packages around it."""
    names: set[str] = set()
    for module, members, plain in IMPORT.findall(_text(file)):
        name = module or plain
        names |= {name[: dot.start()] for dot in re.finditer(r"\.|$", name)}
        names |= {f"{name}.{member}" for member in re.findall(r"\w+", members)}
    return frozenset(names)


@cache
def _text(file: Path) -> str:
    return file.read_text()


@cache
def _files() -> dict[str, Path]:
    """Every module of the project by its dotted name; helpers of tests by their bare one."""
    found: dict[str, Path] = {}
    for root in (*ROOT.glob("services/*"), ROOT / "operator", ROOT / "e2e", ROOT / "charts"):
        for file in root.rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            parts = parts[1:] if parts[0] == "tests" else parts
            if parts and parts[-1] != "conftest":
                found[".".join(parts).removesuffix(".__init__")] = file
    return found


def _is_test_code(file: Path) -> bool:
    return "tests" in file.parts or ROOT / "e2e" in file.parents
