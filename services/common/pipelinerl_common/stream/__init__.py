"""The sample stream on NATS JetStream. Only this package imports nats.

login = Login.of(wiring)
async with connect(url, "maths", settings.stream, name="actor-0", login=login) as stream:
    await stream.publish_group(group)

async with stream.samples(max_pending=256) as received_groups:
    async for received in received_groups:
        ...
        await received.ack()
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pipelinerl_common.stream.connection import StreamConnection
    from pipelinerl_common.stream.layout import StreamLayout
    from pipelinerl_common.stream.login import ANONYMOUS, Login
    from pipelinerl_common.stream.samples import ReceivedGroup
    from pipelinerl_common.stream.server import NatsServer
    from pipelinerl_common.stream.stream import Journal, Stream, connect

__all__ = [
    "ANONYMOUS",
    "Journal",
    "Login",
    "NatsServer",
    "ReceivedGroup",
    "Stream",
    "StreamConnection",
    "StreamLayout",
    "connect",
]

_MODULES: Final = {
    "connection": ("StreamConnection",),
    "layout": ("StreamLayout",),
    "login": ("ANONYMOUS", "Login"),
    "samples": ("ReceivedGroup",),
    "server": ("NatsServer",),
    "stream": ("Journal", "Stream", "connect"),
}


def __getattr__(name: str) -> Any:
    """Imports each name on first use: the operator manages streams and never needs the codec's
    numpy.
    """
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
