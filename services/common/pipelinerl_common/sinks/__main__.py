"""`python -m pipelinerl_common.sinks`: writes a job's metrics to its sinks until standard input
ends, which happens also when the trainer that started this process has died. Prints a line of JSON
for every change of {sink: {"written": n, reason: n, ...}}.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from pipelinerl_common.service import Wiring, parse_wiring, run_service
from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.sinks.sink import RowBuilder, Sink, SinkThread, TensorBoardSink, WandbSink
from pipelinerl_common.stream import Login, connect

LAST_RECORDS_S = 1.0
"""Wait after the end of the input for the last step's record, which may still be in flight."""
CLOSE_S = 15.0
COUNTS_EVERY_S = 2.0


def make_sinks(job: Job, wiring: Wiring) -> list[Sink]:
    """The sinks that the job names."""
    sinks = job.spec.telemetry.sinks
    made: list[Sink] = []
    if sinks.tensorboard is not None:
        made.append(TensorBoardSink(sinks.tensorboard, wiring.output / "tensorboard"))
    if sinks.wandb is not None:
        config = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        made.append(WandbSink(sinks.wandb, wiring.output / "wandb", job=job.name, config=config))
    return made


async def follow(job: Job, wiring: Wiring, threads: Sequence[SinkThread], since: float) -> None:
    """Consumes the metrics stream and puts each step's row into the queues of all sinks, until
    cancelled. Raises Unavailable without a stream server.
    """
    rows = RowBuilder(since)
    login = Login.of(wiring)
    async with (
        connect(
            wiring.nats_url,
            job.name,
            job.spec.stream,
            name=wiring.name,
            namespace=job.metadata.namespace,
            login=login,
        ) as stream,
        stream.metrics() as records,
    ):
        async for record in records:
            row = rows.take(record)
            if row is None:
                continue
            for thread in threads:
                thread.put(row)


async def report_counts(threads: Sequence[SinkThread]) -> None:
    """Prints the counts whenever they have changed, until cancelled."""
    printed = ""
    while True:
        await asyncio.sleep(COUNTS_EVERY_S)
        printed = print_counts(threads, printed)


def print_counts(threads: Sequence[SinkThread], printed: str = "") -> str:
    """Prints the counts unless they equal `printed`; returns them."""
    counts = json.dumps(
        {thread.name: {"written": thread.written, **thread.dropped} for thread in threads}
    )
    if counts != printed:
        sys.stdout.write(counts + "\n")
        sys.stdout.flush()
    return counts


async def input_ends() -> None:
    """Returns when the process at the other end of standard input has closed it or has ended."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.read(4096):
        pass


async def run(wiring: Wiring, since: float, stop: asyncio.Event) -> None:
    """Feeds the sinks until the input ends or `stop` is set, then closes them."""
    job = load_job(wiring.job_file)
    threads = [SinkThread(sink) for sink in make_sinks(job, wiring)]
    work = [
        asyncio.ensure_future(follow(job, wiring, threads, since)),
        asyncio.ensure_future(report_counts(threads)),
    ]
    ends = [asyncio.ensure_future(input_ends()), asyncio.ensure_future(stop.wait())]
    done, _ = await asyncio.wait([*work, *ends], return_when=asyncio.FIRST_COMPLETED)
    # A failure of the work ends the process without a wait; the trainer starts it again.
    if not done & set(work):
        await asyncio.wait(work, timeout=LAST_RECORDS_S)
    for task in (*work, *ends):
        task.cancel()
    await asyncio.gather(*work, *ends, return_exceptions=True)
    await asyncio.gather(*(asyncio.to_thread(thread.close, CLOSE_S) for thread in threads))
    print_counts(threads)
    for task in done & set(work):
        task.result()


def main(argv: Sequence[str] | None = None) -> int:
    since = time.time()
    wiring = parse_wiring("sinks", argv)
    return run_service(
        lambda stop: run(wiring, since, stop), name=wiring.name, log_level=wiring.log_level
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a hanging sink, or its library's clean-up, must not keep the process alive
