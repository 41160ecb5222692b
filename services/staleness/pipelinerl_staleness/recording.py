"""The calls of a policy and its answers as records, and their replay through a new policy.

A record is (method, arguments, answer), all plain JSON values:

    ["policy", ["areal", {"eta": 1, "max_concurrent": null}, 2], null]   a new policy with B = 2
    ["admitted", ["0-17"], null]                                         an event
    ["take", [4], [["0-16", "0-17"], [], ""]]                            a decision: groups,
                                                                         dropped, wait reason

Policies have no clock and no randomness, so the same events give the same answers: anything else is
a difference.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any, cast

from pipelinerl_staleness.policy import EngineLoad, Policy, Take
from pipelinerl_staleness.registry import make_policy, name_of, parse_policy_settings

START = "policy"
EVENTS = (
    "admitted",
    "started",
    "first_token",
    "last_token",
    "trajectory_finished",
    "finished",
    "lost",
    "step_begun",
    "step_done",
    "recover",
)
DECISIONS = ("published", "observe", "take", "take_next")
QUESTIONS = ("may_admit", "may_publish", "publishes_after", "trajectory_limit")
"""Calls that change nothing: a repeated one with no event in between is recorded once."""
NOTES = ("load", "lengths")
"""Records between the events for `pipelinerl simulate --from-run`; no policy receives them."""

Record = tuple[str, list[Any], Any]


def recorded(policy: Policy, write: Callable[[str, list[Any], Any], None]) -> Policy:
    """The same policy, which reports every call to `write` once it has answered."""
    write(START, [name_of(policy.settings), asdict(policy.settings), policy.groups_per_step], None)
    return cast(Policy, _Recorded(policy, write))


class _Recorded:
    """A proxy of the policy that writes its recorded calls and forwards all others."""

    def __init__(self, policy: Policy, write: Callable[[str, list[Any], Any], None]) -> None:
        self._policy = policy
        self._write = write
        self._asked: set[tuple[Any, ...]] = set()
        for name in (*EVENTS, *DECISIONS, *QUESTIONS):
            setattr(self, name, self._recording(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _recording(self, name: str) -> Callable[..., Any]:
        method = getattr(self._policy, name)

        def call(*arguments: Any) -> Any:
            answer = method(*arguments)
            if name not in QUESTIONS:
                self._asked.clear()
            elif (name, *arguments) in self._asked:
                return answer
            else:
                self._asked.add((name, *arguments))
            self._write(name, [_plain(argument) for argument in arguments], _plain(answer))
            return answer

        return call


@dataclass(frozen=True, slots=True)
class Difference:
    """The first record that a fresh policy answers differently, or that cannot be replayed.
    `number` counts from 0.
    """

    number: int
    what: str


@dataclass(slots=True)
class Replay:
    """The outcome of a replay: what it has compared and found the same."""

    num_events: int = 0
    num_decisions: int = 0
    difference: Difference | None = None


def replay(records: Iterable[Record]) -> Replay:
    """Feeds the records through fresh policies, up to the first difference."""
    outcome = Replay()
    policy: Policy | None = None
    for number, (method, arguments, recorded_answer) in enumerate(records):
        if method in NOTES:
            continue
        try:
            if method == START:
                name, parameters, groups_per_step = arguments
                policy = make_policy(parse_policy_settings(name, parameters), groups_per_step)
                continue
            answer = _asked(policy, method, arguments)
        except (ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
            outcome.difference = Difference(
                number, f"{method}{tuple(arguments)} cannot be replayed: {error!r}"
            )
            return outcome
        if answer != recorded_answer:
            what = (
                f"{method}{tuple(arguments)} was answered {recorded_answer} then and {answer} now"
            )
            outcome.difference = Difference(number, what)
            return outcome
        if method in EVENTS:
            outcome.num_events += 1
        else:
            outcome.num_decisions += 1
    return outcome


def _asked(policy: Policy | None, method: str, arguments: list[Any]) -> Any:
    if policy is None:
        raise ValueError("no policy was begun before it")
    if method not in (*EVENTS, *DECISIONS, *QUESTIONS):
        raise ValueError("no such event")
    call = getattr(policy, method)
    return _plain(call(EngineLoad(*arguments[0])) if method == "observe" else call(*arguments))


def _plain(value: Any) -> Any:
    """The value as it is after a round trip through JSON."""
    if isinstance(value, EngineLoad):
        return list(astuple(value))
    if isinstance(value, Take):
        return [list(value.groups), list(value.dropped), value.wait_reason]
    return list(value) if isinstance(value, tuple) else value
