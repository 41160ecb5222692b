"""Strict checks of policy parameters. Each raises a ValueError that names the field, its value and
what is allowed. A settings class declares them with its fields:

    eta: int = whole(3, at_least=0)
"""

from dataclasses import field
from functools import partial

LARGEST = 1_000_000_000
"""The largest whole number of a parameter, as of algorithm.steps."""


def check_whole(name: str, value: object, at_least: int) -> None:
    """A whole number from `at_least` to LARGEST; booleans are refused."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")
    if value > LARGEST:
        raise ValueError(f"{name}={value!r} must be a whole number of at most {LARGEST}")


def check_optional_whole(name: str, value: object, at_least: int) -> None:
    """A whole number as in `check_whole`, or None."""
    if value is not None:
        check_whole(name, value, at_least)


def check_number(name: str, value: object, at_least: float, *, above: bool = False) -> None:
    """A finite number of at least `at_least`, or greater than it with `above`."""
    valid = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and at_least <= float(value) < float("inf")
        and not (above and float(value) == at_least)
    )
    if not valid:
        raise ValueError(
            f"{name}={value!r} must be a number {'above' if above else 'of at least'} {at_least:g}"
        )


def check_flag(name: str, value: object) -> None:
    """True or False, not 0 or 1."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def check_choice(name: str, value: object, *, choices: tuple[str, ...]) -> None:
    """One of the given words."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")


def whole(default: int, *, at_least: int) -> int:
    """A field that `check_whole` checks."""
    return field(default=default, metadata={"check": partial(check_whole, at_least=at_least)})


def optional_whole(*, at_least: int) -> int | None:
    """A field that is unset by default and that `check_optional_whole` checks."""
    return field(default=None, metadata={"check": partial(check_optional_whole, at_least=at_least)})


def number(default: float, *, at_least: float, above: bool = False) -> float:
    """A field that `check_number` checks."""
    check = partial(check_number, at_least=at_least, above=above)
    return field(default=default, metadata={"check": check})


def flag(default: bool) -> bool:
    """A field that `check_flag` checks."""
    return field(default=default, metadata={"check": check_flag})


def choice(default: str, *others: str) -> str:
    """A field that takes one of these words."""
    return field(
        default=default, metadata={"check": partial(check_choice, choices=(default, *others))}
    )
