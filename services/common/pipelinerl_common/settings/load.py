"""Reads a job file, applies `--set path=value`, and turns every mistake into one readable message."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings.job import Job

_FREE_FORM = {"args", "engineArgs", "engine_args", "podTemplate", "pod_template"}
"""Mappings whose keys are another program's names, taken letter by letter."""
_FOLLOWS_FROM_ANOTHER = "default_factory_not_called"
"""A default that depends on a field which is wrong itself."""


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Reads `path` (YAML or JSON). `overrides` are `dotted.path=value` below `spec`. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: a job file is a mapping with apiVersion, kind, metadata and spec")
    for override in overrides:
        _apply_override(document, override)
    return parse_job(document, source=str(path))


def parse_job(document: Mapping[str, Any], source: str) -> Job:
    """Validates a job document. Raises SettingsError that lists every fault with its path, its value and the remedy."""
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        lines = [f"  {_describe(detail)}" for detail in error.errors() if detail["type"] != _FOLLOWS_FROM_ANOTHER]
        raise SettingsError("\n".join([f"{source}: {len(lines)} fault(s) in the job file", *lines])) from error


def _apply_override(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().removeprefix("spec.").split(".")
    if not separator or not all(keys):
        raise SettingsError(f"--set {override}: expected path=value, for example staleness.eta=2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {override}: the value is not valid YAML: {error}") from error
    node = document.setdefault("spec", {})
    for depth, key in enumerate(keys):
        if not isinstance(node, dict):
            raise SettingsError(f"--set {override}: spec.{'.'.join(keys[:depth])} is not a mapping")
        spelled = key if _FREE_FORM & set(keys[:depth]) else _spelling(node, key)
        if depth + 1 == len(keys):
            node[spelled] = value
        else:
            node = node.setdefault(spelled, {})


def _spelling(node: Mapping[str, Any], key: str) -> str:
    """`key` as the document has it already, in camelCase or snake_case."""
    return next((present for present in node if to_camel(str(present)) == to_camel(key)), key)


def _describe(detail: ErrorDetails) -> str:
    location = ".".join(str(part) for part in detail["loc"]) or "the file"
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(detail["loc"][-1]), _field_names(detail["loc"][:-1]), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{location}: unknown field{hint}"
    if detail["type"] == "missing":
        return f"{location}: missing"
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | list) else f" (got {value!r})"
    return f"{location}: {message}{shown}"


def _field_names(location: Sequence[int | str]) -> list[str]:
    """Names allowed in the mapping at `location` of a job document."""
    model: type[BaseModel] = Job
    for part in location:
        field = next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        nested = [candidate for candidate in candidates if isinstance(candidate, type) and issubclass(candidate, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return [field.alias or name for name, field in model.model_fields.items()]
