"""A job's streams and subjects on JetStream, and their configuration."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import StreamSettings

HEADER_RESERVE_BYTES: Final = 4096
"""Part of the server's payload limit that is kept for headers, which count too."""

CONSUMER: Final = "preprocessor"
DAY_S: Final = 86_400.0

_DEDUPLICATION_S: Final = 300.0
_MAX_UNACKED_MESSAGES: Final = 100_000
_SIDE_STREAM_BYTES: Final = 256 << 20
_KEY: Final = re.compile(r"^[-/_=.a-zA-Z0-9]+$")

_UNREPAIRABLE: Final = {
    10074: "stream.replicas={settings.replicas}: {error.description}; set it to 1 for a single "
    "server",
    10047: "stream.maxBytes={settings.max_bytes}: {error.description}; lower it or give the server "
    "more disk",
}


@dataclass(frozen=True)
class StreamLayout:
    """The names and configurations of one job's streams. Names of jobs and namespaces consist of
    lower-case letters, digits and '-'.

    Example: job "maths" has the streams maths_samples (subject maths.samples), maths_dead
    (maths.dead), maths_metrics (maths.metrics) and the key-value bucket maths_journal. In the
    namespace "team" they are team_maths_samples (team.maths.samples) and so on, so that two jobs of
    one name can share a server.
    """

    job: str
    settings: StreamSettings
    namespace: str | None = None

    def __post_init__(self) -> None:
        for what, name in (("name", self.job), ("namespace", self.namespace)):
            if name is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
                raise SettingsError(
                    f"metadata.{what}={name!r}: use lower-case letters, digits and '-' only"
                )

    def _joined(self, separator: str, kind: str) -> str:
        return separator.join(part for part in (self.namespace, self.job, kind) if part is not None)

    def stream(self, kind: str) -> str:
        """Stream name of "samples", "dead" or "metrics"."""
        return self._joined("_", kind)

    def subject(self, kind: str) -> str:
        return self._joined(".", kind)

    @property
    def _journal(self) -> str:
        return self._joined("_", "journal")

    @property
    def journal_stream(self) -> str:
        return f"KV_{self._journal}"

    def journal_subject(self, key: str) -> str:
        """Raises ValueError for a key that NATS cannot hold."""
        if not _KEY.match(key) or key.startswith(".") or key.endswith(".") or ".." in key:
            raise ValueError(
                f"journal key {key!r}: use letters, digits and - / _ = . (not at the ends, not "
                "doubled)"
            )
        return f"$KV.{self._journal}.{key}"

    def journal_key(self, subject: str) -> str:
        return subject.removeprefix(f"$KV.{self._journal}.")

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of all streams."""
        return tuple(str(config.name) for config in self.stream_configs())

    @property
    def publish_subjects(self) -> tuple[str, ...]:
        """Subjects that a service of the job may publish to: the job's own, and those of
        JetStream's requests and acknowledgements.
        """
        own = tuple(
            subject for config in self.stream_configs() for subject in config.subjects or ()
        )
        return (*own, "$JS.API.>", "$JS.ACK.>")

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the server reserves for the streams; it refuses streams that do not fit."""
        return sum(config.max_bytes or 0 for config in self.stream_configs())

    def stream_configs(self) -> tuple[StreamConfig, ...]:
        replicas = self.settings.replicas
        common = {"storage": StorageType.FILE, "num_replicas": replicas}
        return (
            StreamConfig(
                name=self.stream("samples"),
                subjects=[self.subject("samples")],
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
                max_bytes=self.settings.max_bytes,
                max_age=self.settings.max_age_seconds,
                duplicate_window=min(_DEDUPLICATION_S, self.settings.max_age_seconds),
                **common,
            ),
            StreamConfig(
                name=self.stream("dead"),
                subjects=[self.subject("dead")],
                max_bytes=_SIDE_STREAM_BYTES,
                max_age=7 * DAY_S,
                **common,
            ),
            StreamConfig(
                name=self.stream("metrics"),
                subjects=[self.subject("metrics")],
                max_bytes=_SIDE_STREAM_BYTES,
                max_age=7 * DAY_S,
                **common,
            ),
            # Configured as the nats command line does it, so that `nats kv` can read the bucket.
            StreamConfig(
                name=self.journal_stream,
                subjects=[f"$KV.{self._journal}.>"],
                max_msgs_per_subject=1,
                allow_rollup_hdrs=True,
                allow_direct=True,
                discard=DiscardPolicy.NEW,
                max_bytes=_SIDE_STREAM_BYTES,
                **common,
            ),
        )

    async def ensure(self, jetstream: JetStreamContext) -> None:
        """Creates missing streams and updates those that differ. Raises SettingsError when the
        server cannot provide what the settings ask for.
        """
        for config in self.stream_configs():
            try:
                await _ensure_one(jetstream, config)
            except nats.js.errors.APIError as error:
                template = _UNREPAIRABLE.get(error.err_code or 0)
                if template is None:
                    raise
                raise SettingsError(template.format(settings=self.settings, error=error)) from error

    def sample_consumer(self) -> ConsumerConfig:
        """The one durable consumer of the sample stream.

        A message is redelivered when the reader starts again, never by time: the reader bounds how
        much it holds, and an optimizer step may take arbitrarily long.
        """
        return ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=7 * DAY_S,
            max_ack_pending=_MAX_UNACKED_MESSAGES,
        )


async def _ensure_one(jetstream: JetStreamContext, config: StreamConfig) -> None:
    # Adding a stream that exists would reserve its bytes a second time, so an update comes first.
    with suppress(nats.js.errors.NotFoundError):
        await jetstream.update_stream(config)
        return
    try:
        await jetstream.add_stream(config)
    except nats.js.errors.APIError as refused:
        try:  # another process may have added it in the meantime
            await jetstream.update_stream(config)
        except nats.js.errors.NotFoundError:
            raise refused from None
