"""Events that people read with `kubectl describe`, limited per job and without repetitions."""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelinerl_common.errors import PipelineRLError
from pipelinerl_operator.controller.decision import Note
from pipelinerl_operator.controller.status import write_time
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Api, ObjectKey
from pipelinerl_operator.kube.client import FIELD_MANAGER
from pipelinerl_operator.kube.resources import EVENTS, JOBS

log = logging.getLogger(__name__)

REPEAT_S = 600.0
"""Time in which the same event is not written again."""
BURST = 20
REFILL_S = 30.0
"""After a burst, a job may write one event in this time."""
MAX_WORDS = 64
MAX_NOTE_CHARACTERS = 950


@dataclass
class _Budget:
    """Token bucket of one job, and when it wrote which event."""

    tokens: float
    at: float
    said: OrderedDict[str, float] = field(default_factory=OrderedDict)


class EventRecorder:
    """Writes events; one that cannot be written is logged and dropped."""

    def __init__(self, api: Api, identity: str, clock: Callable[[], float] = time.time) -> None:
        self.dropped = 0
        """Number of events beyond the limit of their job."""
        self._api = api
        self._identity = identity
        self._clock = clock
        self._budgets: dict[ObjectKey, _Budget] = {}

    async def record(self, job: JobView, note: Note) -> None:
        now = self._clock()
        log.info("job=%s event=%s %s", job.key, note.reason, note.message)
        if not self._may(job.key, f"{note.reason} {note.message}", now):
            return
        # The time makes the name unique: an event that was deleted may be written again.
        digest = hashlib.sha256(
            f"{job.uid} {note.reason} {note.message} {now}".encode()
        ).hexdigest()[:16]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.key.name}.{digest}", "namespace": job.key.namespace},
            "involvedObject": {
                "apiVersion": JOBS.api_version,
                "kind": JOBS.kind,
                "namespace": job.key.namespace,
                "name": job.key.name,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            "type": note.type.value,
            "reason": note.reason,
            "message": note.message[:MAX_NOTE_CHARACTERS],
            "firstTimestamp": write_time(now),
            "lastTimestamp": write_time(now),
            "count": 1,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._identity,
        }
        try:
            await self._api.create(EVENTS, job.key.namespace, body)
        except PipelineRLError as error:
            log.warning("job=%s the event %s was not written: %s", job.key, note.reason, error)

    def forget(self, key: ObjectKey) -> None:
        self._budgets.pop(key, None)

    def _may(self, key: ObjectKey, words: str, now: float) -> bool:
        budget = self._budgets.setdefault(key, _Budget(BURST, now))
        if now - budget.said.get(words, float("-inf")) < REPEAT_S:
            return False
        budget.tokens, budget.at = min(BURST, budget.tokens + (now - budget.at) / REFILL_S), now
        if budget.tokens < 1:
            self.dropped += 1
            return False
        budget.tokens -= 1
        budget.said[words] = now
        budget.said.move_to_end(words)
        if len(budget.said) > MAX_WORDS:
            budget.said.popitem(last=False)
        return True
