"""`pipelinerl new-task`: its arguments, and the two files that it writes."""

import argparse
import importlib.util
import keyword
import sys
from pathlib import Path

from pipelinerl_cli.new_task.template import JOB, TASK
from pipelinerl_common.errors import SettingsError

MAX_CHARACTERS = 40
"""As in metadata.name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="in lower case with underscores, for example sort_digits")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where to write, by default here"
    )


def run(args: argparse.Namespace) -> int:
    """Writes NAME.py and NAME.yaml. Raises SettingsError for a name that cannot be one, and when a
    file is there already.
    """
    name, folder = _checked(args.name), args.folder
    texts = {folder / f"{name}.py": TASK, folder / f"{name}.yaml": JOB}
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise SettingsError(
            f"{' and '.join(there)} would be overwritten: choose another name or --folder"
        )
    if _shadows_another(name):
        raise SettingsError(
            f"name={name!r}: Python has a module of this name, which {name}.py would stand before; "
            "choose another, such as "
            f"{name}_task"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(
                text.format(module=name, job=name.replace("_", "-"), task=_class_name(name)),
                encoding="utf-8",
            )
    except OSError as error:
        raise SettingsError(f"--folder {folder}: cannot be written: {error}") from error
    print(f"wrote {' and '.join(map(str, texts))}\n")
    print(
        f"Try it: {'' if folder == Path() else f'cd {folder}; '}pipelinerl up {name}.yaml "
        "--max-steps 20"
    )
    return 0


def _checked(name: str) -> str:
    is_module = (
        name.isidentifier()
        and name.isascii()
        and name == name.lower()
        and name[0] != "_"
        and name[-1] != "_"
    )
    if not is_module or keyword.iskeyword(name) or len(name) > MAX_CHARACTERS:
        raise SettingsError(
            f"name={name!r}: a module and a job are named after it; use at most {MAX_CHARACTERS} "
            "lower-case letters, digits "
            "and underscores, beginning with a letter"
        )
    return name


def _shadows_another(name: str) -> bool:
    """Whether the standard library or an installed package is called so. A folder without modules
    is passed over.
    """
    if name in sys.stdlib_module_names:
        return True
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def _class_name(name: str) -> str:
    """Example: "sort_digits" is "SortDigits"."""
    return "".join(part.capitalize() for part in name.split("_"))
