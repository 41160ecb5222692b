"""Signals to a started process, and its end, without losing its exit status.

Never call `send_signal`, `terminate` or `kill` of an asyncio process: they first ask the system for
its status (Popen.poll). When it has just ended and the event loop has not collected the status
yet, they take it, and the loop then reports 255 for every process, finished or crashed.
"""

import asyncio
import os
import signal
from contextlib import suppress


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signals the process. Does nothing when it has ended."""
    # Once its status was collected, its number may belong to another process.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> bool:
    """SIGTERM, and SIGKILL when it has not ended after `grace_s` seconds; returns whether the first
    was enough. The process has ended on return, also when the caller is cancelled meanwhile.
    """
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
            return True
    except TimeoutError:
        return False
    finally:
        # Also when this coroutine is cancelled: nothing outlives the process that started it.
        send_signal(process, signal.SIGKILL)
        await process.wait()
