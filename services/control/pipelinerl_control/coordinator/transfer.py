"""One update of every member: fan out, find out early that it cannot succeed, tell culprits from
bystanders.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl_common.tracing import span
from pipelinerl_control.coordinator.generator import Answer, GeneratorClient

REFUSALS = frozenset({400, 401, 409, 422})


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    answers: Mapping[str, Answer]
    expelled: Mapping[str, str]
    """Members to be left out, with the reason. The others either serve the version or are
    bystanders of the failure.
    """
    aborted: bool
    """The group was given up while members were still waiting in it."""

    @property
    def published(self) -> bool:
        """Every remaining member serves the version, and there is one."""
        remaining = [answer for name, answer in self.answers.items() if name not in self.expelled]
        return bool(remaining) and all(answer.ok for answer in remaining)


async def update_members(
    members: Mapping[str, GeneratorClient],
    body: Mapping[str, Any],
    timeout_s: float,
    abort: Callable[[], Awaitable[None]],
) -> TransferOutcome:
    """Posts /request_weight_update to all at once and waits at most `timeout_s` plus the answers'
    grace.

    The trainer broadcasts only when every member receives. So when one fails before any has
    succeeded, the others wait in vain:
    `abort` then ends the group, and with it their waiting.
    """
    tasks = {
        name: asyncio.create_task(_update(name, client, body, timeout_s), name=f"update {name}")
        for name, client in members.items()
    }
    pending = set(tasks.values())
    aborted = False
    early: set[str] = set()
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if aborted:
                continue
            early |= {name for name, task in tasks.items() if task in done and not task.result().ok}
            if (
                early
                and pending
                and not any(task.done() and task.result().ok for task in tasks.values())
            ):
                aborted = True
                await abort()
    finally:
        for task in pending:
            task.cancel()
    answers = {name: task.result() for name, task in tasks.items()}
    return TransferOutcome(answers, blame_updates(answers, early), aborted)


async def _update(
    name: str, client: GeneratorClient, body: Mapping[str, Any], timeout_s: float
) -> Answer:
    with span("update generator", generator=name) as updating:
        answer = await client.update_weights(body, timeout_s)
        updating.set(status=answer.status, error=answer.error)
        return answer


def blame_updates(answers: Mapping[str, Answer], early: set[str]) -> dict[str, str]:
    """Who is expelled, and why. `early` failed before the group was given up.

    Silence and refusals are a member's own fault. When there is such a member, or the group was
    given up, other errors are its consequence. Members whose checksum is not the common one hold
    wrong weights.
    """
    failed = {name for name, answer in answers.items() if not answer.ok}
    own_fault = {
        name for name in failed if answers[name].is_silence or answers[name].status in REFUSALS
    }
    culprits = own_fault or (failed & early) or failed
    expelled = {name: answers[name].error for name in sorted(culprits)}
    checksums = Counter(
        str(answer.body.get("checksum", "")) for answer in answers.values() if answer.ok
    )
    if len(checksums) > 1:
        common = checksums.most_common(1)[0][0]
        for name, answer in answers.items():
            if answer.ok and str(answer.body.get("checksum", "")) != common:
                expelled[name] = (
                    f"checksum {answer.body.get('checksum')} differs from the other members' "
                    f"{common}"
                )
    return expelled
