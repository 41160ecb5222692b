"""Writes the reference pages that are made from the source: settings of a job, the command line.

python e2e/reference_pages.py            writes them into docs/pages/reference
python e2e/reference_pages.py --check    fails when they are not up to date
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metrics_page import metrics_page
from pipelinerl_common.settings import JobSpec

FOLDER = Path(__file__).parents[1] / "docs/pages/reference"
PIPELINERL = Path(sysconfig.get_path("scripts")) / "pipelinerl"
WIDTH = "100"
"""Columns of the help texts, whatever terminal this runs in."""

Schema = Mapping[str, Any]


def job_settings() -> str:
    """One table for each section of `spec`, from the settings' own texts."""
    schema = JobSpec.model_json_schema(by_alias=True)
    definitions: Mapping[str, Schema] = schema["$defs"]
    top = {
        name: prop
        for name, prop in schema["properties"].items()
        if not _sections(prop, definitions)
    }
    parts = [
        "# Settings of a job",
        "Every setting below `spec` of a `PipelineRLJob`; `kubectl explain pipelinerljob.spec` "
        "shows the same texts. An unknown setting is refused, with the nearest known name. In a "
        "list, `[]` stands for each entry. Parameters of `staleness` depend on the policy: see "
        "[staleness policies](staleness-policies.md).",
        "## spec",
        _table(_row(name, prop, definitions) for name, prop in sorted(top.items())),
    ]
    for name, prop in schema["properties"].items():
        if name not in top:
            text = prop.get("description", "")
            rows = (
                _row(path, leaf, definitions) for path, leaf in _leaves(name, prop, definitions)
            )
            parts += [f"## spec.{name}", text, _table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sections(prop: Schema, definitions: Mapping[str, Schema]) -> list[tuple[Schema, bool]]:
    """The settings classes that a value may be, and whether it is a list of them."""
    found = []
    for choice in [prop, *prop.get("anyOf", []), *prop.get("allOf", [])]:
        is_list = choice.get("type") == "array"
        reference = (choice.get("items", {}) if is_list else choice).get("$ref", "")
        section = definitions.get(reference.rpartition("/")[2], {})
        if "properties" in section:
            found.append((section, is_list))
    return found


def _leaves(
    path: str, prop: Schema, definitions: Mapping[str, Schema]
) -> Iterator[tuple[str, Schema]]:
    sections = _sections(prop, definitions)
    if not sections:
        yield path, prop
    for section, is_list in sections:
        for name, inner in section["properties"].items():
            yield from _leaves(f"{path}{'[]' if is_list else ''}.{name}", inner, definitions)


def _table(rows: Iterator[str]) -> str:
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows])


def _row(path: str, prop: Schema, definitions: Mapping[str, Schema]) -> str:
    text = " ".join(str(prop.get("description", "")).split())
    default = "required" if "default" not in prop else _plain(prop["default"])
    cells = (f"`{path}`", _values(prop, definitions), default, text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(default: object) -> str:
    if default is None or default == {} or default == []:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(prop: Schema, definitions: Mapping[str, Schema]) -> str:
    if "$ref" in prop:
        return _values(definitions.get(prop["$ref"].rpartition("/")[2], {}), definitions)
    choices = [each for each in prop.get("anyOf", []) if each.get("type") != "null"]
    if choices:
        return " or ".join(dict.fromkeys(_values(each, definitions) for each in choices))
    if "enum" in prop:
        return ", ".join(f"`{each}`" for each in prop["enum"])
    if "const" in prop:
        return f"`{prop['const']}`"
    return " ".join(filter(None, [str(prop.get("type", "any")), _bounds(prop)]))


def _bounds(prop: Schema) -> str:
    low, high = prop.get("minimum"), prop.get("maximum")
    above, below = prop.get("exclusiveMinimum"), prop.get("exclusiveMaximum")
    return ", ".join(
        f"{sign} {bound}"
        for sign, bound in ((">=", low), (">", above), ("<=", high), ("<", below))
        if bound is not None
    )


def command_line() -> str:
    """The help of every command, as the terminal shows it."""
    overview = _help()
    names = [
        line.split()[0]
        for line in overview.splitlines()
        if line.startswith("    ") and line[4] != " "
    ]
    parts = ["# The command line", f"```\n{overview}\n```"]
    parts += [f"## pipelinerl {name}\n\n```\n{_help(name)}\n```" for name in names]
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    result = subprocess.run(
        [PIPELINERL, *command, "--help"],
        env={**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return result.stdout.strip()


PAGES = {
    "job-settings.md": job_settings,
    "command-line.md": command_line,
    "metrics.md": metrics_page,
}


def outdated_pages() -> list[str]:
    return [
        name
        for name, write in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != write()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        outdated = outdated_pages()
        sys.exit(f"not up to date: {', '.join(outdated)}" if outdated else 0)
    for name, write in PAGES.items():
        (FOLDER / name).write_text(write())


if __name__ == "__main__":
    main()
