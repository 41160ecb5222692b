"""What nats-server holds for a job, read from a real server."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipelinerl_common.errors import Unavailable
from pipelinerl_common.stream import StreamLayout
from pipelinerl_operator.nats.streams import AccountStreams, SharedStreams
from pipelinerl_operator.objects.job_resource import JobResource

LOOK_S = 2.0


@dataclass(frozen=True)
class StreamState:
    """State of a job's sample stream."""

    pending: int
    """Messages that have not been acknowledged."""
    oldest_seconds: float
    """Age of the oldest of them by the server's clock; 0 without one."""


async def observe(
    streams: AccountStreams | SharedStreams, job: JobResource, timeout_s: float = LOOK_S
) -> StreamState | None:
    """The job's sample stream, None while it does not exist. Raises Unavailable."""
    requests = streams._server._requests
    stream = StreamLayout(job.name, job.spec.stream, job.namespace).stream("samples")
    if isinstance(streams, SharedStreams):
        answer = json.loads(await requests.ask(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s))
        return None if "error" in answer else _state(answer["state"], answer["ts"])
    query = json.dumps({"account": streams._account(job).public, "streams": True}).encode()
    answers = await requests.ask_all(
        "$SYS.REQ.SERVER.PING.JSZ",
        query,
        is_enough=lambda answers: (
            _find(answers, stream) is not None or len(answers) >= _num_servers(answers[0])
        ),
        timeout_s=timeout_s,
    )
    if not answers:
        raise Unavailable(f"no nats-server with JetStream has answered within {timeout_s:g} s")
    return _find(answers, stream)


def _num_servers(answer: bytes) -> int:
    cluster = json.loads(answer)["data"].get("meta_cluster") or {}
    return int(cluster.get("cluster_size", 1))


def _find(answers: list[bytes], stream: str) -> StreamState | None:
    for answer in map(json.loads, answers):
        for account in answer["data"].get("account_details") or ():
            for detail in account.get("stream_detail") or ():
                if detail["name"] == stream:
                    return _state(detail["state"], answer["server"]["time"])
    return None


def _state(state: dict[str, Any], now: str) -> StreamState:
    messages = int(state["messages"])
    first, last = datetime.fromisoformat(state["first_ts"]), datetime.fromisoformat(now)
    return StreamState(messages, max((last - first).total_seconds(), 0.0) if messages else 0.0)
