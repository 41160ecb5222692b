"""The base of all settings: frozen, strict, camelCase in YAML and snake_case in Python.

Which fields only Kubernetes reads: they are in the one schema, `pipelinerl up` passes over them,
services never see them.
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
        """Below, every field has a bound of its own. Kubernetes and the wire know 64 bits."""
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(
                f"must be at most {LARGEST}, the largest whole number that Kubernetes keeps"
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """As Kubernetes has it; pydantic alone takes them for 0 and 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(
                    "must be a number, not a boolean, as which YAML also reads yes, no, on and off"
                )
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field may have. Example: of Annotated[int, Field(ge=1)] | None int and
    NoneType.
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
