"""`pipelinerl new-task NAME`: writes a task and a job that run as they are, on a CPU."""

import argparse
import importlib.util
import keyword
import sys
from pathlib import Path

from pipelinerl_common.errors import SettingsError

MAX_CHARACTERS = 40
"""As in metadata.name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="in lower case with underscores, for example sort_digits")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where to write, by default here"
    )


def run(args: argparse.Namespace) -> int:
    """Writes NAME.py and NAME.yaml. Raises SettingsError for an unusable name and when one of the
    files exists.
    """
    from pipelinerl_cli.pages import render

    name, folder = args.name, args.folder
    _check(name)
    paths = [folder / f"{name}.{extension}" for extension in ("py", "yaml")]
    if existing := [str(path) for path in paths if path.exists()]:
        raise SettingsError(
            f"{' and '.join(existing)} would be overwritten: choose another name or --folder"
        )
    if _hides_a_module(name):
        raise SettingsError(
            f"name={name!r}: {name}.py would hide an installed module of that name; choose "
            f"another, such as {name}_task"
        )
    task = "".join(part.capitalize() for part in name.split("_"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            template = f"new_task{path.suffix}.j2"
            text = render(template, module=name, job=name.replace("_", "-"), task=task)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--folder {folder}: cannot be written: {error}") from error
    print(f"wrote {' and '.join(map(str, paths))}\n")
    change_folder = "" if folder == Path() else f"cd {folder}; "
    print(f"Try it: {change_folder}pipelinerl up {name}.yaml --max-steps 20")
    return 0


def _check(name: str) -> None:
    is_lower_case = name.isidentifier() and name.isascii() and name == name.lower()
    if (
        not is_lower_case
        or name.strip("_") != name
        or keyword.iskeyword(name)
        or len(name) > MAX_CHARACTERS
    ):
        raise SettingsError(
            f"name={name!r}: a module and a job are named after it; use at most {MAX_CHARACTERS} "
            "lower-case letters, digits and underscores, beginning with a letter"
        )


def _hides_a_module(name: str) -> bool:
    """Whether the standard library or an installed package has this name. Folders without modules
    do not count.
    """
    if name in sys.stdlib_module_names:
        return True
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
