"""The intake: from the sample stream to groups that wait for training."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from pipelinerl_common.errors import PermanentError, TemporaryError
from pipelinerl_common.stream import ReceivedGroup
from pipelinerl_common.tracing import span
from pipelinerl_common.types import SampleGroup
from pipelinerl_preprocessor.groups import Arrival, DropReason, Group
from pipelinerl_preprocessor.live import LiveLedger
from pipelinerl_preprocessor.preparation import Preparation, PreparedGroup
from pipelinerl_preprocessor.reference import Reference

log = logging.getLogger(__name__)


class Intake:
    """The consumer of the sample stream: it checks groups and makes them ready for training.

    With a reference, groups are scored concurrently, and the stream is read no faster than that.
    """

    def __init__(
        self, live: LiveLedger, preparation: Preparation, reference: Reference | None
    ) -> None:
        self._live = live
        self._preparation = preparation
        self._reference = reference
        self._scoring = asyncio.Semaphore(reference.max_concurrent if reference else 1)

    async def run(self, groups: AsyncIterator[ReceivedGroup]) -> None:
        """Consumes `groups`, produces ready groups; waits for messages and for a free place at the
        reference, and is unblocked by a finished score.
        """
        async with asyncio.TaskGroup() as scoring:
            async for received in groups:
                await self._handle(received, scoring)

    async def _handle(self, received: ReceivedGroup, scoring: asyncio.TaskGroup) -> None:
        live, group = self._live, received.group
        live.counters.tokens_received.inc(group.num_sampled)
        arrival = live.ledger.arrive(group.group_id)
        leased = live.ledger.groups.get(group.group_id)
        if arrival is not Arrival.ACCEPTED or leased is None:
            await self._turn_away(received, arrival)
            return
        live.received[group.group_id] = received
        live.note("lengths", _lengths(group))
        with live.tracer.continued(
            "preprocess", received.traceparent, group=group.group_id
        ) as preprocessing:
            prepared = self._checked(received, leased)
            if isinstance(prepared, DropReason):
                preprocessing.set(dropped=prepared.value)
                await live.drop(group.group_id, prepared)
                return
            prepared = replace(prepared, traceparent=preprocessing.traceparent)
            if self._reference is None:
                await live.finish(prepared)
            else:
                # Blocks the reader while the reference is busy: messages stay on the server.
                await self._scoring.acquire()
                scoring.create_task(self._score(self._reference, prepared))

    async def _turn_away(self, received: ReceivedGroup, arrival: Arrival) -> None:
        group = received.group
        if arrival is not Arrival.TRAINED:
            log.info(
                "dropped group=%s attempt=%d reason=%s",
                group.group_id,
                group.attempt,
                arrival.value,
            )
            self._live.counters.dropped(arrival.value, group.num_sampled, len(group.samples))
        await received.ack()

    def _checked(self, received: ReceivedGroup, leased: Group) -> PreparedGroup | DropReason:
        newest_version = self._live.ledger.state.num_committed + 1
        fault = self._preparation.fault(received.group, leased.prompt_index, newest_version)
        prepared = fault or self._preparation.prepare(received.group)
        if isinstance(prepared, PreparedGroup):
            self._live.counters.sequences_masked.inc(prepared.num_masked)
            self._live.counters.sequences_overlong.inc(prepared.num_overlong)
        return prepared

    async def _score(self, reference: Reference, prepared: PreparedGroup) -> None:
        try:
            with span("score"):
                scored = self._preparation.with_reference(
                    prepared, await reference.score(prepared.sequences)
                )
        except (TemporaryError, PermanentError) as error:
            log.warning("group=%s not scored by the reference: %s", prepared.group_id, error)
            await self._live.drop(prepared.group_id, DropReason.REFERENCE)
        else:
            if isinstance(scored, DropReason):
                await self._live.drop(prepared.group_id, scored)
            else:
                await self._live.finish(scored)
        finally:
            self._scoring.release()


def _lengths(group: SampleGroup) -> list[Any]:
    """The group, its time of completion, and the tokens of its prompt and of each completion."""
    first = group.samples[0]
    return [
        group.group_id,
        round(group.finished_at, 3),
        first.segment_lengths[0],
        [sample.num_sampled for sample in group.samples],
    ]
