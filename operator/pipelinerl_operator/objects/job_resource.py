"""A PipelineRLJob as it lies in the API server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl_common.settings import API_VERSION, KIND, Job, JobSpec, parse_newer_job
from pipelinerl_control.plan import with_actors
from pipelinerl_operator.objects.admission import admit


@dataclass(frozen=True, slots=True)
class JobResource:
    """One version of the resource, with its spec checked."""

    job: Job
    """Name and spec, as `pipelinerl up` would read them from a file."""
    namespace: str
    uid: str
    generation: int
    deletion_timestamp: str | None
    """RFC 3339, once somebody has deleted it."""
    raw: Mapping[str, Any]
    unknown_fields: tuple[str, ...] = ()
    """Paths of what the API server's CRD knows and this operator does not: it is older than the
    CRD. They are left out.
    """

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def is_deleted(self) -> bool:
        return self.deletion_timestamp is not None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "JobResource":
        """Raises SettingsError that lists every fault of the spec.

        The same rules as the CRD's, which a server without CEL does not check.
        """
        metadata = raw["metadata"]
        document = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": raw.get("spec", {}),
        }
        job, unknown = parse_newer_job(document, source=f"PipelineRLJob {metadata['name']}")
        admit(job)
        return cls(
            job=job,
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            deletion_timestamp=metadata.get("deletionTimestamp"),
            raw=raw,
            unknown_fields=unknown,
        )

    def with_actors(self, count: int) -> "JobResource":
        """The same with another number of actors, within the spec's bounds."""
        return replace(self, job=with_actors(self.job, count))

    def owner_reference(self) -> dict[str, Any]:
        """For `metadata.ownerReferences` of everything that goes with the job."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
