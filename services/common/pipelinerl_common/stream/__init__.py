"""The sample stream on NATS JetStream. Only this package imports nats."""

from pipelinerl_common.stream.server import NatsServer

__all__ = ["NatsServer"]
