"""The base of all settings: frozen, strict, camelCase in YAML and snake_case in Python."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

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
