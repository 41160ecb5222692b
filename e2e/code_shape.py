"""Measures the shape of the shipped source: rooms, files, functions, names and layers of reading.

    python e2e/code_shape.py            one row for each package, and the totals that a test bounds
    python e2e/code_shape.py PACKAGE    also lists what breaks a bound in that package

Lines of code (neither blank, comment nor documentation) are counted as they are, and as they would
be at 128 columns, the width at which the bound on the size of the source was set: a narrower page
does not count as more code, and documentation is not saved at the expense of readers.
"""

import ast
import json
import statistics
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [
    *sorted((ROOT / "services").glob("*/pipelinerl_*")),
    ROOT / "operator/pipelinerl_operator",
]
RUFF = Path(sysconfig.get_path("scripts")) / "ruff"
REFERENCE_WIDTH = 128
LIMIT_RULES = "C901,PLR0912,PLR0913,PLR0915,PLR1702"
MAX_NESTED_BLOCKS = 3
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450
SMALL_MODULE_LINES = 40

type_of_function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One shipped module."""

    path: Path
    package: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        name = ".".join(parts[parts.index(self.package) :])
        return name.removesuffix(".__init__")

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def num_code_lines(self) -> int:
        return _num_code_lines(self.text)

    @cached_property
    def num_code_lines_at_reference_width(self) -> int:
        """Lines of code if statements were laid out at the width of the reference."""
        options = ["--config", "format.skip-magic-trailing-comma=true"]
        width = ["--line-length", str(REFERENCE_WIDTH)]
        return _num_code_lines(_ruff("format", *width, *options, "-", text=self.text))

    @cached_property
    def functions(self) -> list[tuple[int, str]]:
        """Length in lines and place of every function."""
        return [
            (
                (node.end_lineno or node.lineno) - node.lineno + 1,
                f"{self.path}:{node.lineno} {node.name}",
            )
            for node in ast.walk(self.tree)
            if isinstance(node, type_of_function)
        ]

    @property
    def public_classes(self) -> Iterator[str]:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    @cached_property
    def imported_modules(self) -> set[str]:
        """Modules named by this one's imports; `from a import b` names both `a` and `a.b`."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        return names


@dataclass(frozen=True)
class Shape:
    """What the test in `test_code_shape.py` bounds."""

    sources: list[Source]

    @property
    def num_lines(self) -> int:
        return sum(source.num_lines for source in self.sources)

    @property
    def num_code_lines(self) -> int:
        return sum(source.num_code_lines for source in self.sources)

    @property
    def files_per_1000_code_lines(self) -> float:
        return 1000 * len(self.sources) / self.num_code_lines

    @property
    def median_file_lines(self) -> float:
        return statistics.median(source.num_lines for source in self.sources)

    @property
    def long_files(self) -> list[str]:
        return [f"{s.path}: {s.num_lines}" for s in self.sources if s.num_lines > MAX_FILE_LINES]

    @property
    def long_functions(self) -> list[str]:
        return [
            f"{place}: {length}"
            for source in self.sources
            for length, place in source.functions
            if length > MAX_FUNCTION_LINES
        ]

    @property
    def repeated_class_names(self) -> dict[str, list[str]]:
        places: dict[str, list[str]] = defaultdict(list)
        for source in self.sources:
            for name in source.public_classes:
                places[name].append(source.module)
        return {name: where for name, where in sorted(places.items()) if len(where) > 1}

    @property
    def small_modules_with_one_importer(self) -> list[str]:
        """Modules under 40 lines that only one other imports; policies, entry points excepted."""
        importers = Counter(name for source in self.sources for name in source.imported_modules)
        return [
            source.module
            for source in self.sources
            if source.num_lines < SMALL_MODULE_LINES
            and source.path.name not in ("__init__.py", "__main__.py")
            and source.package != "pipelinerl_staleness"
            and importers[source.module] == 1
        ]

    def share_of(self, package: str) -> float:
        return sum(s.num_lines for s in self.sources if s.package == package) / self.num_lines

    @cached_property
    def limit_breaches(self) -> list[str]:
        """What ruff finds of complexity, branches, arguments, statements and nesting."""
        found = _ruff("check", "--preview", "--select", LIMIT_RULES, "--output-format", "json",
                "--config", f"lint.pylint.max-nested-blocks={MAX_NESTED_BLOCKS}",
                      *(str(source.path) for source in self.sources))  # fmt: skip
        return [
            f"{item['filename']}:{item['location']['row']} {item['code']} {item['message']}"
            for item in json.loads(found)
        ]

    @property
    def num_code_lines_at_reference_width(self) -> int:
        return sum(source.num_code_lines_at_reference_width for source in self.sources)


def _num_code_lines(text: str) -> int:
    """Lines that are neither blank, comment nor documentation."""
    documented = {
        row
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        1
        for row, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and row not in documented
    )


def _ruff(*arguments: str, text: str | None = None) -> str:
    result = subprocess.run(
        [RUFF, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, timeout=120
    )
    if result.returncode not in (0, 1):  # 1: it has findings
        raise RuntimeError(f"ruff {arguments[0]} failed: {result.stderr}")
    return result.stdout


def shipped_sources() -> list[Source]:
    return [
        Source(path, package.name) for package in PACKAGES for path in sorted(package.rglob("*.py"))
    ]


def _print_room(name: str, shape: Shape) -> None:
    longest = max(length for source in shape.sources for length, _ in source.functions)
    print(
        f"{name:24}{len(shape.sources):6}{shape.num_lines:8}{shape.num_code_lines:7}"
        f"{shape.num_code_lines_at_reference_width:9}{shape.files_per_1000_code_lines:9.1f}{shape.median_file_lines:8.0f}"
        f"{max(source.num_lines for source in shape.sources):6}{longest:6}"
    )


def _print_findings(shape: Shape, package: str) -> None:
    lists = {
        "files that are too long": shape.long_files,
        "functions that are too long": shape.long_functions,
        "limit breaches": shape.limit_breaches,
        "small modules with one importer": shape.small_modules_with_one_importer,
        "class names used twice": [
            f"{k}: {', '.join(v)}" for k, v in shape.repeated_class_names.items()
        ],
    }
    for title, rows in lists.items():
        mine = [row for row in rows if package in row]
        print(f"\n{title}: {len(mine)} of {len(rows)}")
        print("\n".join(f"  {row}" for row in mine))


def main(arguments: list[str]) -> None:
    shape = Shape(shipped_sources())
    print(f"{'':24} files   lines   code  at 128c  per 1000  median   max  func")
    for package in [*arguments] or [path.name for path in PACKAGES]:
        _print_room(package, Shape([s for s in shape.sources if s.package == package]))
    _print_room("all", shape)
    print(
        f"\ncli share {shape.share_of('pipelinerl_cli'):.1%}, "
        f"breaches per 1000 lines {1000 * len(shape.limit_breaches) / shape.num_lines:.2f}, "
        f"class names used twice {len(shape.repeated_class_names)}, "
        f"small modules with one importer {len(shape.small_modules_with_one_importer)}"
    )
    for package in arguments:
        _print_findings(shape, package)


if __name__ == "__main__":
    main(sys.argv[1:])
