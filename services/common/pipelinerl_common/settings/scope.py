"""Which fields only Kubernetes reads: they are in the one schema, `pipelinerl up` passes over them,
services never see them.
"""

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel


class ClusterOnly:
    """Marks a field in its annotation: `suspend: Annotated[bool, CLUSTER_ONLY] = False`."""


CLUSTER_ONLY: Final = ClusterOnly()


def cluster_only_paths(settings: BaseModel) -> list[str]:
    """Fields below `settings` that are marked and differ from their default, in camelCase:
    ["suspend", "model.cache"].
    """
    return list(_paths(settings, ""))


def service_view(settings: BaseModel) -> dict[str, Any]:
    """`settings` as services read it: JSON with the file's field names, without the marked fields
    and without nulls.
    """
    return {
        alias: service_view(value) if isinstance(value, BaseModel) else dumped
        for alias, value, dumped, marked in _fields(settings)
        if not marked and value is not None
    }


def _paths(settings: BaseModel, prefix: str) -> Iterator[str]:
    fields = type(settings).model_fields
    by_alias = {field.alias or name: field for name, field in fields.items()}
    for alias, value, _, marked in _fields(settings):
        if isinstance(value, BaseModel) and not marked:
            yield from _paths(value, f"{prefix}{alias}.")
        elif marked and value != by_alias[alias].get_default(call_default_factory=True):
            yield prefix + alias


def _fields(settings: BaseModel) -> Iterator[tuple[str, Any, Any, bool]]:
    """(name in the file, value, value as JSON, marked) of every field, those that a section allows
    beside its own included.
    """
    dumped = settings.model_dump(mode="json", by_alias=True)
    for name, field in type(settings).model_fields.items():
        alias = field.alias or name
        marked = any(isinstance(each, ClusterOnly) for each in field.metadata)
        yield alias, getattr(settings, name), dumped[alias], marked
    for name, value in (settings.model_extra or {}).items():
        yield name, value, dumped[name], False
