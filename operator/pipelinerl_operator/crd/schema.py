"""A pydantic model as a structural schema: what apiextensions.k8s.io/v1 accepts, with bounds
everywhere.

Differences to JSON Schema: nothing is referred to, nothing may be null (a field is left out
instead), unknown fields are pruned rather than forbidden, and what is free-form says so. Bounds are
needed because a rule's cost is estimated by the largest value. Where a section comes a second time,
as that of the generators does, its fields say where they are described; in the status, which people
do not write, they say nothing.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
MAX_LENGTH, MAX_ITEMS, MAX_PROPERTIES = 4096, 256, 256
"""Bounds of what the settings leave open."""
_KEPT = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "pattern",
    "enum",
)


def structural_schema(model: type[BaseModel], *, with_defaults: bool = True) -> Schema:
    """Without defaults for what only the operator writes. Raises ValueError that names a field
    without structural form.
    """
    root = model.model_json_schema(by_alias=True)
    return _Conversion(root.get("$defs", {}), with_defaults).schema(root, model.__name__)


class _Conversion:
    def __init__(self, definitions: Mapping[str, Schema], with_defaults: bool) -> None:
        self._definitions = definitions
        self._with_defaults = with_defaults
        self._first: dict[str, str] = {}
        """Path at which each section came first, by the name of its model."""

    def schema(self, source: Schema, path: str, described_at: str = "") -> Schema:
        """`described_at`: path of the field that is the same and came first, where there is one."""
        source = self._resolved(source, path)
        kind = source.get("type")
        converted: Schema = {}
        if described_at:
            converted |= {"description": f"As {described_at}."} if self._with_defaults else {}
        elif description := source.get("description"):
            converted["description"] = " ".join(description.split())
        if kind is None and "const" not in source and "enum" not in source:
            if source.keys() - {"title", "description", "default"}:
                raise ValueError(f"{path}: {source} has no structural form")
            return converted | {PRESERVE: True}
        converted["type"] = kind or _type_of(
            [*source.get("enum", ()), *([source["const"]] if "const" in source else ())], path
        )
        converted |= {key: source[key] for key in _KEPT if key in source}
        if "const" in source:
            converted["enum"] = [source["const"]]
        for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if bound in source:
                converted |= {limit: source[bound], bound: True}
        converted |= self._default(source, converted["type"])
        return converted | self._parts(source, converted["type"], path)

    def _parts(self, source: Schema, kind: str, path: str) -> Schema:
        """What belongs to the type: fields, items, a string's bound."""
        if kind == "object":
            return self._object(source, path)
        if kind == "array":
            return self._array(source, path)
        if kind == "string" and "enum" not in source and "const" not in source:
            return {"maxLength": source.get("maxLength", MAX_LENGTH)}
        return {}

    def _resolved(self, source: Schema, path: str) -> Schema:
        """Without references and without the alternative null. What is said beside a reference goes
        first.
        """
        if "$ref" in source:
            target = self._definitions[source["$ref"].rpartition("/")[2]]
            beside = {key: value for key, value in source.items() if key != "$ref"}
            return self._resolved({**target, **beside}, path)
        if "anyOf" in source:
            alternatives = [each for each in source["anyOf"] if each.get("type") != "null"]
            if len(alternatives) != 1:
                raise ValueError(
                    f"{path}: {len(alternatives)} alternatives have no structural form"
                )
            beside = {key: value for key, value in source.items() if key != "anyOf"}
            return self._resolved({**alternatives[0], **beside}, path)
        return source

    def _default(self, source: Schema, kind: str) -> Schema:
        """A section's default is empty: its fields bring their own. An empty string is none: a 1.20
        server reads it as null.
        """
        default = source.get("default")
        if default is None or default == "" or not self._with_defaults:
            return {}
        return {"default": {} if kind == "object" and source.get("properties") else default}

    def _object(self, source: Schema, path: str) -> Schema:
        others = source.get("additionalProperties", False)
        parts: Schema = {}
        if properties := source.get("properties"):
            first = self._first.setdefault(source["title"], path)
            same = "" if first == path else f"{first.partition('.')[2]}."
            parts["properties"] = {
                name: self.schema(each, f"{path}.{name}", f"{same}{name}" if same else "")
                for name, each in properties.items()
            }
        if source.get("required"):
            parts["required"] = sorted(source["required"])
        if others is True or (
            isinstance(others, dict) and not self._resolved(others, path).get("type")
        ):
            return parts | {PRESERVE: True}
        if isinstance(others, dict):
            values = self.schema(others, f"{path}.*")
            return parts | {
                "additionalProperties": values,
                "maxProperties": source.get("maxProperties", MAX_PROPERTIES),
            }
        return parts

    def _array(self, source: Schema, path: str) -> Schema:
        items = source.get("items")
        if items is None:
            first, *rest = source.get("prefixItems") or [{}]
            if any(other != first for other in rest):
                raise ValueError(f"{path}: a list of different items has no structural form")
            items = first
        return {
            "items": self.schema(items, f"{path}[]"),
            "maxItems": source.get("maxItems", MAX_ITEMS),
        }


def _type_of(values: list[Any], path: str) -> str:
    """Of the values of an enumeration."""
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number")):
        if values and all(isinstance(value, kind) for value in values):
            return name
    raise ValueError(f"{path}: the values {values} have no common type")
