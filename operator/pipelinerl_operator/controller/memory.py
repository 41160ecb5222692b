"""What the operator keeps in mind of a job between two looks, and can do without: a new leader
begins with nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Resource

REFUSAL_S = 60.0
"""How long a refusal of the API server is believed before it is asked again."""

ENSURED_S = 600.0
"""How long a Secret that was made or read is believed to be there."""


@dataclass
class Memory:
    """Of one job, by its UID. Times are monotonic seconds."""

    job: JobView
    """As it was looked at last."""
    token: str | None = None
    """The job's bearer token, once its Secret has been made or read."""
    ensured_generation: int = -1
    """Generation of the spec for which the job has its Secret and its place on the stream's server.
    """
    ensured_at: float = 0.0
    has_left: bool = False
    """Whether its place on the stream's server was given up."""
    stream_fault: str = ""
    """Why it has no place on the stream's server yet."""
    checked_generation: int = -1
    """Generation of the spec whose templates the API server has accepted."""
    refusal: str = ""
    refused_generation: int = -1
    refused_at: float = 0.0
    namespace_going_at: float | None = None
    applied: dict[tuple[Resource, str], tuple[str, str]] = field(default_factory=dict)
    """UID and content version of each child as the operator applied it last, or found it when it
    began.
    """
    pods: Mapping[str, int] = field(default_factory=dict)
    """Attempts by name of the pods that were there at the last look, without those that were then
    to be deleted.
    """
    noticed_at: float | None = None
    """When it was first noticed that the status in the API server is out of date."""
    training_written_at: float = float("-inf")
    written: tuple[str, int] | None = None
    """Resource version after the newest write of the status, and a hash of what was written."""

    def is_ensured(self, generation: int, now: float) -> bool:
        """False again after a while: nobody watches Secrets, and one may be gone."""
        return (
            self.token is not None
            and self.ensured_generation == generation
            and now - self.ensured_at < ENSURED_S
        )

    def refuse(self, message: str, generation: int, now: float) -> None:
        self.refusal, self.refused_generation, self.refused_at = message, generation, now

    def current_refusal(self, generation: int, now: float) -> str:
        """Empty once the spec has changed or the time has come to ask again."""
        if self.refused_generation != generation or now - self.refused_at >= REFUSAL_S:
            return ""
        return self.refusal

    def namespace_is_going(self, now: float) -> bool:
        return self.namespace_going_at is not None and now - self.namespace_going_at < REFUSAL_S
