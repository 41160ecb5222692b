"""The sample stream on NATS JetStream. Only this package imports nats.

async with connect(url, "maths", settings.stream, name="actor-0", login=Login.of(wiring)) as stream:
    await stream.publish_group(group)

async with stream.samples(max_pending=256) as received_groups:
    async for received in received_groups:
        ...
        await received.ack()
"""

from pipelinerl_common.stream.job_stream import Stream, connect
from pipelinerl_common.stream.journal import Journal
from pipelinerl_common.stream.layout import Layout
from pipelinerl_common.stream.login import ANONYMOUS, Login
from pipelinerl_common.stream.requests import ServerRequests
from pipelinerl_common.stream.samples import ReceivedGroup
from pipelinerl_common.stream.server import NatsServer

__all__ = ["ANONYMOUS", "Journal", "Layout", "Login", "NatsServer", "ReceivedGroup", "ServerRequests", "Stream", "connect"]
