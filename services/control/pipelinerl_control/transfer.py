"""The two things that a weight-transfer group does together, and who is to blame when they fail.

Forming: the trainer opens the rendezvous, every generator joins at once. Updating: every member is
asked at once; the group is given up as soon as it cannot succeed.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from pydantic import ValidationError

from pipelinerl.v1 import weights_pb2
from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.generator_api import (
    InitGroupRequest,
    InitGroupResponse,
    UnknownManifest,
    UpdateRequest,
    UpdateResponse,
)
from pipelinerl_common.generator_client import GeneratorClient, GeneratorError
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_common.tracing import span
from pipelinerl_control.membership import WeightGroup
from pipelinerl_control.observer import TrainerClient
from pipelinerl_weights.manifest import Manifest

Response = TypeVar("Response")
JoinReply = InitGroupResponse | GeneratorError
UpdateReply = UpdateResponse | GeneratorError

TIMED_OUT = 504
OWN_FAULT = frozenset({0, 200, 400, 401, 409, 422})
"""Statuses of members that are to blame for a failed update by themselves: no answer, an answer
that breaks the contract, and refusals.
"""


async def _reply(call: Awaitable[Response]) -> Response | GeneratorError:
    """The call's response or the error that it ended with."""
    try:
        return await call
    except GeneratorError as error:
        return error


@dataclass(frozen=True, slots=True)
class FormFailure:
    """Why a group was not formed.

    `culprits` are excluded from the next attempt; empty when no generator caused the failure.
    """

    culprits: Mapping[str, str]
    reason: str


async def form_group(
    group: WeightGroup,
    trainer: TrainerClient,
    generators: Mapping[str, GeneratorClient],
    settings: WeightTransferSettings,
) -> FormFailure | None:
    """Forms `group` within `settings.form_timeout_seconds` plus the grace for answers.

    Returns None when every member has joined.
    """
    timeout_s = settings.form_timeout_seconds
    try:
        rendezvous = await trainer.join_group(
            epoch=group.epoch,
            world_size=group.world_size,
            backend=settings.backend,
            port=settings.port,
            timeout_s=timeout_s,
        )
    except PipelineRLError as error:
        return FormFailure({}, f"the trainer did not join: {error}")
    try:
        requests = {
            member.name: InitGroupRequest(
                epoch=group.epoch,
                master_address=rendezvous.address,
                master_port=rendezvous.port,
                rank_offset=member.rank_offset,
                world_size=group.world_size,
                backend=settings.backend,
                timeout_s=timeout_s,
            )
            for member in group.members
        }
    except ValidationError as error:
        return FormFailure({}, f"not a group that generators can join: {error}")
    # All at once: every generator waits in the rendezvous until the last one has joined.
    tasks = {
        name: asyncio.create_task(
            _reply(generators[name].init_process_group(request)), name=f"join {name}"
        )
        for name, request in requests.items()
    }
    return blame_joins(await _until_first_failure(tasks))


async def _until_first_failure(
    tasks: Mapping[str, asyncio.Task[JoinReply]],
) -> dict[str, JoinReply]:
    """Returns the replies so far once a generator has failed, else those of all generators.

    A timeout (504) does not count as a failure: such a generator waited for another one, which is
    still to be found.
    """
    # After a failure the others would wait for the failed one until their deadline: cancel them.
    pending = set(tasks.values())
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            replies = [task.result() for task in done]
            if any(
                isinstance(reply, GeneratorError) and reply.status != TIMED_OUT for reply in replies
            ):
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return {name: task.result() for name, task in tasks.items() if not task.cancelled()}


def blame_joins(replies: Mapping[str, JoinReply]) -> FormFailure | None:
    """Returns which generators kept the group from forming, or None when it formed. One that waited
    for the others until its deadline (504) is not to blame.
    """
    failed = {name: reply for name, reply in replies.items() if isinstance(reply, GeneratorError)}
    if not failed:
        return None
    culprits = {name: str(error) for name, error in failed.items() if error.status != TIMED_OUT}
    return FormFailure(culprits, "; ".join(f"{name}: {error}" for name, error in failed.items()))


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The result of one update of all members."""

    replies: Mapping[str, UpdateReply]
    expelled: Mapping[str, str]
    """Members to exclude, with the reason. The others either serve the version or failed only
    because of an expelled one.
    """
    aborted: bool
    """The group was given up while members were still waiting in it."""

    @property
    def published(self) -> bool:
        """Every remaining member serves the version, and there is one."""
        remaining = [reply for name, reply in self.replies.items() if name not in self.expelled]
        return bool(remaining) and all(isinstance(reply, UpdateResponse) for reply in remaining)


async def update_members(
    members: Mapping[str, GeneratorClient],
    request: UpdateRequest,
    manifest: weights_pb2.WeightManifest,
    abort: Callable[[], Awaitable[None]],
) -> TransferOutcome:
    """Posts `request`, which names `manifest` by its hash, to all at once and waits at most until
    its deadline plus the answers' grace.

    The trainer sends only when every member receives. So when one fails before any has
    succeeded, the others would wait until their deadline: `abort` then ends the group, and with it
    their waiting.
    """

    @cache
    def with_manifest() -> UpdateRequest:
        full = Manifest.from_proto(manifest).to_json()
        return request.model_copy(update={"manifest": full, "manifest_hash": None})

    tasks = {
        name: asyncio.create_task(
            _update(name, client, request, with_manifest), name=f"update {name}"
        )
        for name, client in members.items()
    }
    pending = set(tasks.values())
    aborted = False
    early: set[str] = set()
    try:
        while pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if aborted:
                continue
            ended = {name: task.result() for name, task in tasks.items() if task.done()}
            early = {name for name, reply in ended.items() if isinstance(reply, GeneratorError)}
            # Until one succeeds, the others wait for the one that failed, up to their deadline.
            if early and pending and len(early) == len(ended):
                aborted = True
                await abort()
    finally:
        for task in pending:
            task.cancel()
    replies = {name: task.result() for name, task in tasks.items()}
    return TransferOutcome(replies, blame_updates(replies, early), aborted)


async def _update(
    name: str,
    client: GeneratorClient,
    request: UpdateRequest,
    with_manifest: Callable[[], UpdateRequest],
) -> UpdateReply:
    with span("update generator", generator=name) as updating:
        reply = await _reply(client.update_weights(request))
        if isinstance(reply, GeneratorError) and _needs_manifest(reply):
            reply = await _reply(client.update_weights(with_manifest()))
        if isinstance(reply, GeneratorError):
            updating.set(status=reply.status, error=str(reply))
        else:
            updating.set(status=200, error="")
        return reply


def _needs_manifest(error: GeneratorError) -> bool:
    """Returns whether the generator refused only because it lacks the manifest, as it does in the
    first update of a group. A generator of a release before manifests had hashes answers 422.
    """
    return error.kind == UnknownManifest.__name__ or error.status == 422


def blame_updates(replies: Mapping[str, UpdateReply], early: set[str]) -> dict[str, str]:
    """Returns which members are expelled, and why. `early` failed before the group was given up.

    Silence and refusals are a member's own fault. When there is such a member, or the group was
    given up, other errors are its consequence. Members whose checksum is not the common one hold
    wrong weights.
    """
    failed = {name: reply for name, reply in replies.items() if isinstance(reply, GeneratorError)}
    own_fault = {name for name, error in failed.items() if error.status in OWN_FAULT}
    culprits = own_fault or (failed.keys() & early) or failed.keys()
    expelled = {name: str(failed[name]) for name in sorted(culprits)}
    checksums = {
        name: reply.checksum for name, reply in replies.items() if isinstance(reply, UpdateResponse)
    }
    if len(set(checksums.values())) > 1:
        common = Counter(checksums.values()).most_common(1)[0][0]
        expelled |= {
            name: f"checksum {checksum} differs from the other members' {common}"
            for name, checksum in checksums.items()
            if checksum != common
        }
    return expelled
