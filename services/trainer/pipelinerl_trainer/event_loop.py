"""The two directions between the event loop and the training thread.

The event loop runs in the main thread: gRPC, the publisher, signals. Training blocks, so it has a
thread of its own (`in_thread`) and asks for what it needs of the network (`EventLoopProxy`).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pipelinerl_common.errors import Unavailable

Result = TypeVar("Result")


class EventLoopProxy:
    """The event loop as the training thread uses it. Constructed in the event loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Asks training to end at the next step's boundary."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def wait(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Runs `coroutine` in the event loop and returns its result. Raises Unavailable after
        `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            # The caller will try again: the late call must not take effect beside its repetition.
            future.cancel()
            raise Unavailable(
                f"{getattr(coroutine, '__qualname__', 'a call')} did not end within {timeout_s:g} s"
            ) from error

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedules a plain function in the event loop's thread, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def pause(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a stop if that comes first."""
        self._stopping.wait(seconds)


async def in_thread(function: Callable[[], Result], name: str) -> Result:
    """Runs `function` in a daemon thread called `name` and returns its result.

    Not `asyncio.to_thread`, whose threads Python joins at exit: a rank that hangs in a collective
    must not keep its process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not future.done():  # the waiting task may have been cancelled meanwhile
            act()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
