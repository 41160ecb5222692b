"""Forming a weight-transfer group: the trainer opens the rendezvous, every generator joins at once."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_common.settings import WeightTransferSettings
from pipelinerl_control.coordinator.generator import Answer, GeneratorClient
from pipelinerl_control.coordinator.membership import Group
from pipelinerl_control.coordinator.trainer import TrainerClient

TIMED_OUT = 504


@dataclass(frozen=True, slots=True)
class FormFailure:
    """`culprits` are left out next time; empty when the failure cannot be laid at a generator's
    door.
    """

    culprits: Mapping[str, str]
    reason: str


async def form_group(
    group: Group,
    trainer: TrainerClient,
    generators: Mapping[str, GeneratorClient],
    settings: WeightTransferSettings,
) -> FormFailure | None:
    """Forms `group` within `settings.form_timeout_seconds` plus the answers' grace. None when every
    member has joined.
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
    tasks: dict[str, asyncio.Task[Answer]] = {}
    for member in group.members:
        body = {
            "epoch": group.epoch,
            "master_address": rendezvous.address,
            "master_port": rendezvous.port,
            "rank_offset": member.rank_offset,
            "world_size": group.world_size,
            "backend": settings.backend,
        }
        call = generators[member.name].init_process_group(body, timeout_s)
        tasks[member.name] = asyncio.create_task(call, name=f"join {member.name}")
    return blame_joins(await _until_first_failure(tasks))


async def _until_first_failure(tasks: Mapping[str, asyncio.Task[Answer]]) -> dict[str, Answer]:
    """Answers so far when one has failed (the rest would wait for it until their deadline), else of
    all.

    One that timed out waiting for the others does not count: the one that it waited for is still to
    be found.
    """
    pending = set(tasks.values())
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(not task.result().ok and task.result().status != TIMED_OUT for task in done):
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return {name: task.result() for name, task in tasks.items() if not task.cancelled()}


def blame_joins(answers: Mapping[str, Answer]) -> FormFailure | None:
    """Who kept the group from forming. One that waited in vain for the others (504) is not to
    blame.
    """
    failed = {name: answer.error for name, answer in answers.items() if not answer.ok}
    if not failed:
        return None
    culprits = {name: error for name, error in failed.items() if answers[name].status != TIMED_OUT}
    return FormFailure(culprits, "; ".join(f"{name}: {error}" for name, error in failed.items()))
