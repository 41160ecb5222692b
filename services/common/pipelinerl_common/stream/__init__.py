"""The sample stream on NATS JetStream. Only this package imports nats.

async with connect(url, "maths", settings.stream, name="actor-0", login=Login.of(wiring)) as stream:
    await stream.publish_group(group)

async with stream.samples(max_pending=256) as received_groups:
    async for received in received_groups:
        ...
        await received.ack()
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pipelinerl_common.stream.layout import StreamLayout
    from pipelinerl_common.stream.login import ANONYMOUS, Login
    from pipelinerl_common.stream.requests import ServerRequests
    from pipelinerl_common.stream.samples import ReceivedGroup
    from pipelinerl_common.stream.server import NatsServer
    from pipelinerl_common.stream.stream import Journal, Stream, connect

__all__ = [
    "ANONYMOUS",
    "Journal",
    "Login",
    "NatsServer",
    "ReceivedGroup",
    "ServerRequests",
    "Stream",
    "StreamLayout",
    "connect",
]

_HOMES: Final = {
    "Stream": "stream",
    "connect": "stream",
    "Journal": "stream",
    "StreamLayout": "layout",
    "ANONYMOUS": "login",
    "Login": "login",
    "ServerRequests": "requests",
    "ReceivedGroup": "samples",
    "NatsServer": "server",
}


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first asked for: the operator manages streams and never
    needs the codec's numpy.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
