"""The base of all settings: frozen, strict, camelCase in YAML and snake_case in Python.

Fields that only Kubernetes reads are marked with CLUSTER_ONLY: they belong to the same schema,
`pipelinerl up` ignores them, and services never receive them.
"""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel

LARGEST = 2**63 - 1


class Settings(BaseModel):
    """A section of the job file. Unknown fields are refused; attribute docstrings become the
    descriptions in the CRD.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @field_validator("*")
    @classmethod
    def _whole_numbers_fit(cls, value: Any) -> Any:
        """Bounds whole numbers above; below, every field has its own bound. Kubernetes and the wire
        know 64 bits.
        """
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(
                f"must be at most {LARGEST}, the largest whole number that Kubernetes keeps"
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses booleans where Kubernetes does; pydantic alone takes them for 0 and 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(
                    "must be a number, not a boolean, as which YAML also reads yes, no, on and off"
                )
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields the types that a field may have: int and NoneType for Annotated[int, Field(ge=1)] |
    None.
    """
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield from _kinds(get_args(annotation)[0]) if origin is Annotated else (annotation,)


class ClusterOnly:
    """Marks a field in its annotation: `suspend: Annotated[bool, CLUSTER_ONLY] = False`."""


CLUSTER_ONLY: Final = ClusterOnly()


def cluster_only_paths(settings: BaseModel) -> list[str]:
    """Marked fields below `settings` that differ from their default, in camelCase: ["suspend",
    "model.cache"].
    """
    return list(_paths(settings, ""))


def service_view(settings: BaseModel) -> dict[str, Any]:
    """The part of `settings` that services read: JSON with the file's field names, without the
    marked fields and without nulls.
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
    """Yields (name in the file, value, value as JSON, marked) of every field, and of the fields
    that a section allows beside its own.
    """
    dumped = settings.model_dump(mode="json", by_alias=True)
    for name, field in type(settings).model_fields.items():
        alias = field.alias or name
        marked = any(isinstance(each, ClusterOnly) for each in field.metadata)
        yield alias, getattr(settings, name), dumped[alias], marked
    for name, value in (settings.model_extra or {}).items():
        yield name, value, dumped[name], False
