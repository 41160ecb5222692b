"""A pydantic model as a structural schema: what apiextensions.k8s.io/v1 accepts, with bounds
everywhere.

Differences to JSON Schema: there are no references, no field may be null (it is left out instead),
unknown fields are pruned and not forbidden, and free-form fields are marked. Bounds are needed
because the cost of a rule is estimated for the largest value. When a section occurs a second time,
as that of the generators does, its fields refer to the first; in the status, which people do not
write, they have no description then.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
MAX_LENGTH, MAX_ITEMS, MAX_PROPERTIES = 4096, 256, 256
"""Bounds for fields whose settings have none."""
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
    """Converts a model, without defaults for what only the operator writes. Raises ValueError that
    names a field without structural form.
    """
    root = model.model_json_schema(by_alias=True)
    return _Conversion(root.get("$defs", {}), with_defaults).schema(root, model.__name__)


class _Conversion:
    """The conversion of one model."""

    def __init__(self, definitions: Mapping[str, Schema], with_defaults: bool) -> None:
        self._definitions = definitions
        self._with_defaults = with_defaults
        self._first: dict[str, str] = {}
        """Path of the first occurrence of each section, by the name of its model."""

    def schema(self, source: Schema, path: str, described_at: str = "") -> Schema:
        """Converts a field. `described_at` is the path of an earlier occurrence, if any."""
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
        """What depends on the type: fields, items, the bound of a string."""
        if kind == "object":
            return self._object(source, path)
        if kind == "array":
            return self._array(source, path)
        if kind == "string" and "enum" not in source and "const" not in source:
            return {"maxLength": source.get("maxLength", MAX_LENGTH)}
        return {}

    def _resolved(self, source: Schema, path: str) -> Schema:
        """The schema without references and the alternative null. Keys beside a reference win."""
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
        """The default of a field. That of a section is empty, since its fields have their own;
        there are no empty strings, which a 1.20 server reads as null.
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
    """Type of the values of an enumeration."""
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number")):
        if values and all(isinstance(value, kind) for value in values):
            return name
    raise ValueError(f"{path}: the values {values} have no common type")
