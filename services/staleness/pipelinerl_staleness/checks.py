"""Strict checks of policy parameters. Each raises ValueError that names the field, its value and
what is allowed.
"""

LARGEST = 1_000_000_000
"""As of algorithm.steps."""


def check_whole(name: str, value: object, at_least: int) -> None:
    """A whole number of at least `at_least`, within reason; booleans are refused."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")
    if value > LARGEST:
        raise ValueError(f"{name}={value!r} must be a whole number of at most {LARGEST}")


def check_optional_whole(name: str, value: object, at_least: int) -> None:
    """As `check_whole`, or unset (None)."""
    if value is not None:
        check_whole(name, value, at_least)


def check_number(name: str, value: object, at_least: float, *, above: bool = False) -> None:
    """A finite number of at least `at_least`, or greater than it with `above`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not number
        or not at_least <= float(value) < float("inf")
        or (above and float(value) == at_least)
    ):  # type: ignore[arg-type]
        raise ValueError(
            f"{name}={value!r} must be a number {'above' if above else 'of at least'} {at_least:g}"
        )


def check_flag(name: str, value: object) -> None:
    """True or False and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the given words."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
