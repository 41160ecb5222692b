"""Reads a job file, applies `--set path=value`, and turns every mistake into one readable message.

YAML means here what it means to `kubectl apply`. Unlike with PyYAML by itself, 1e-6 is a number,
12:30 and 2026-11-30 are text, and a key may not appear twice. pydantic-settings was looked at: it
merges sources of settings, but has neither this YAML nor messages with line and nearest name.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings.job import Job
from pipelinerl_common.settings.model import DOTTED_PATH
from pipelinerl_common.text import counted, did_you_mean

_INT: Final = r"[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)"
_FLOAT: Final = (
    r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG: Final = "tag:yaml.org,2002:"
_REPLACED: Final = {_TAG + "int", _TAG + "float", _TAG + "timestamp"}


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and name in lines:
                problem = (
                    f"{key.value!r} is there twice, in lines {lines[name]} and {line}: put "
                    "both together"
                )
                raise ComposerError(None, None, problem, key.start_mark)
            lines[name] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "int", re.compile(rf"^(?:{_INT})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """Quotes text that PyYAML by itself or `_Loader` would read as another type."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Only double quotes keep these line breaks; other styles fold them into spaces.
    style = '"' if set(text) & {"\x85", "\u2028", "\u2029"} else None
    return dumper.represent_scalar(_TAG + "str", text, style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver(_TAG + "float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError that says where and what is wrong."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_yaml(document: Any) -> str:
    """YAML text that `read_yaml` reads back unchanged."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_FREE_FORM = {"args", "engineArgs", "engine_args", "podTemplate", "pod_template"}
"""Mappings whose keys are another program's names, taken literally."""
_FOLLOWS_FROM_ANOTHER = "default_factory_not_called"
"""Type of pydantic's error for a default that depends on a field which is wrong itself."""
_MOST_BYTES = 1 << 20
"""Size above which Kubernetes refuses an object."""
_MOST_PLACES = 2
"""Number of sections beyond which a field's name is no hint to which one was meant."""


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Reads `path` (YAML or JSON). `overrides` are `dotted.path=value` below `spec`. Raises
    SettingsError.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode() if len(content) <= _MOST_BYTES else ""
    except FileNotFoundError as error:
        raise SettingsError(f"{path}: {_no_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}; give a job file (YAML)") from error
    if len(content) > _MOST_BYTES:
        raise SettingsError(
            f"{path}: has more than {_MOST_BYTES >> 20} MiB; give a job file (YAML)"
        )
    try:
        document = read_yaml(text)
    except ValueError as error:
        raise SettingsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise SettingsError(
            f"{path}: a job file is a mapping with apiVersion, kind, metadata and spec"
        )
    for override in overrides:
        _apply_override(document, override)
    return parse_job(document, source=str(path))


def parse_job(document: Mapping[str, Any], source: str) -> Job:
    """Validates a job document. Raises SettingsError that lists every fault with its path, its
    value and the remedy.
    """
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        lines = [
            f"  {describe_fault(detail, Job)}"
            for detail in error.errors()
            if detail["type"] != _FOLLOWS_FROM_ANOTHER
        ]
        raise SettingsError(
            "\n".join([f"{source}: {counted(len(lines), 'fault')} in the job file", *lines])
        ) from error


def _no_file(path: Path) -> str:
    if DOTTED_PATH.match(str(path)):
        return (
            "this is the name of a task, but a job file (YAML) is needed here: one whose "
            "spec.task.path names the task"
        )
    names = (
        [each.name for each in path.parent.iterdir() if each.is_file()]
        if path.parent.is_dir()
        else []
    )
    return f"there is no such file; give a job file (YAML){did_you_mean(path.name, names)}"


def parse_newer_job(document: Mapping[str, Any], source: str) -> tuple[Job, tuple[str, ...]]:
    """Validates like `parse_job` a document that a newer version may have accepted: unknown fields
    are removed. Returns the job with the paths of those, for example "spec.trainers.colour".
    """
    try:
        return Job.model_validate(document), ()
    except ValidationError as error:
        unknown = [
            detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"
        ]
    known = copy.deepcopy(dict(document))
    for location in unknown:
        _leave_out(known, location)
    return parse_job(known, source), tuple(".".join(map(str, location)) for location in unknown)


def _leave_out(document: dict[str, Any], location: Sequence[int | str]) -> None:
    """Removes one field; a path that does not exist is left for `parse_job` to report."""
    node: Any = document
    for part in location[:-1]:
        known = (
            part in node
            if isinstance(node, dict)
            else isinstance(node, list) and isinstance(part, int)
        )
        if not known:
            return
        node = node[part]
    if isinstance(node, dict):
        node.pop(location[-1], None)


def _apply_override(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().removeprefix("spec.").split(".")
    if not separator or not all(keys):
        raise SettingsError(f"--set {override}: expected path=value, for example staleness.eta=2")
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise SettingsError(f"--set {override}: the value is not valid YAML: {error}") from error
    node = document.setdefault("spec", {})
    for depth, key in enumerate(keys):
        if not isinstance(node, dict):
            raise SettingsError(
                f"--set {override}: {'.'.join(['spec', *keys[:depth]])} is not a mapping"
            )
        spelled = key if _FREE_FORM & set(keys[:depth]) else _spelling(node, key)
        if depth + 1 == len(keys):
            node[spelled] = value
        else:
            node = node.setdefault(spelled, {})


def _spelling(node: Mapping[str, Any], key: str) -> str:
    """`key` as the document spells it already, in camelCase or snake_case."""
    return next((present for present in node if to_camel(str(present)) == to_camel(key)), key)


def describe_fault(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """One line about a fault in a document of the model `root`: its path, its value, and what may
    have been meant.
    """
    location = ".".join(str(part) for part in detail["loc"]) or "the file"
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"{location}: unknown field{_meant(detail['loc'], root)}"
    if detail["type"] == "missing":
        return f"{location}: missing"
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | list) else f" (got {value!r})"
    return f"{location}: {message}{shown}"


def _meant(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """A hint for an unknown field: the same name in another section, or a near name in its own."""
    name = str(location[-1])
    places = [path for path in _paths(root) if to_camel(path.rpartition(".")[2]) == to_camel(name)]
    if 0 < len(places) <= _MOST_PLACES:
        return f"; did you mean {' or '.join(map(repr, places))}?"
    return did_you_mean(name, _field_names(location[:-1], root))


def _paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yields all fields of a job file, for example "spec.algorithm.optimizer.learningRate"."""
    for name, field in model.model_fields.items():
        path = f"{above}{field.alias or name}"
        yield path
        nested = _section(field)
        if nested is not None:
            yield from _paths(nested, f"{path}.")


def _field_names(location: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    """Names allowed in the mapping at `location` of a document of the model `root`."""
    models = [root]
    for part in location:
        if isinstance(part, int):  # an item of a list of sections
            continue
        if named := [
            model for model in models if model.__name__ == part
        ]:  # one of several that a field may be
            models = named
            continue
        fields = [each for model in models for each in model.model_fields.items()]
        models = [
            found
            for name, field in fields
            if part in (name, field.alias)
            for found in _models(field.annotation)
        ]
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections in a field's type: itself, or what it is composed of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, or may be left out as a whole."""
    if get_origin(field.annotation) in (list, dict, tuple):
        return None
    candidates = [field.annotation, *get_args(field.annotation)]
    return next(
        (each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)),
        None,
    )
