"""Whether the process's GPUs still answer: a query of NVIDIA's management library, which needs no
CUDA context, on a thread of its own.

A GPU that has left the bus or wedged its driver shows nowhere else until a kernel of it never ends.
The query may then never return either, so silence counts as a fault after a limit.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from pipelinerl_common.errors import Unavailable

log = logging.getLogger(__name__)

PERIOD_S, LIMIT_S = 10.0, 20.0
LOST = "the GPU does not answer: "
"""The beginning of the log line about a fault; `pipelinerl doctor` looks for it."""
_SUCCESS = 0
_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """The management library of NVIDIA's driver."""

    def __init__(self, library: Any, visible: str | None) -> None:
        """`visible` has the devices as CUDA_VISIBLE_DEVICES has them; None stands for all."""
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p
        self._visible = visible

    @classmethod
    def load(cls) -> "Nvml | None":
        """Returns None on a machine without NVIDIA's driver."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        return cls(library, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def query(self) -> None:
        """Asks every visible device for its memory. Raises Unavailable with the device and the
        library's words when one does not answer; may never return.
        """
        self._call("the driver", self._library.nvmlInit_v2)
        for device in self._devices():
            name, handle = f"device {device}", ctypes.c_void_p()
            if device.isdigit():
                find, key = self._library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(int(device))
                self._call(name, find, key, ctypes.byref(handle))
            else:
                find = self._library.nvmlDeviceGetHandleByUUID
                self._call(name, find, device.encode(), ctypes.byref(handle))
            memory = _Memory()
            self._call(name, self._library.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))

    def _devices(self) -> list[str]:
        if self._visible is not None:
            names = [part.strip() for part in self._visible.split(",")]
            # CUDA sees none from the first index that it cannot have, such as -1.
            return list(takewhile(lambda name: name and not name.startswith("-"), names))
        count = ctypes.c_uint()
        self._call("the driver", self._library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        return [str(index) for index in range(count.value)]

    def _call(self, what: str, function: Callable[..., int], *arguments: object) -> None:
        result = function(*arguments)
        if result != _SUCCESS:
            text = self._library.nvmlErrorString(result) or b"unknown error"
            raise Unavailable(f"{what}: {text.decode(errors='replace')}")


class DeviceWatch:
    """Queries the devices at intervals; `fault` never waits for them."""

    def __init__(
        self, query: Callable[[], None], *, period_s: float = PERIOD_S, limit_s: float = LIMIT_S
    ) -> None:
        self._query, self._period_s, self._limit_s = query, period_s, limit_s
        self._error: str | None = None
        self._asked_at: float | None = None
        self._logged: str | None = None
        self._closed = threading.Event()
        # A daemon: a query that never returns must not keep the process from ending.
        threading.Thread(target=self._run, name="device-watch", daemon=True).start()

    def fault(self) -> str | None:
        """Returns why the devices cannot be used, or None while they answer. Logs each change."""
        asked_at, fault = self._asked_at, self._error
        if asked_at is not None and time.monotonic() - asked_at > self._limit_s:
            fault = f"no answer within {self._limit_s:g} s"
        if fault != self._logged:
            self._logged = fault
            if fault is not None:
                log.error("%s%s", LOST, fault)
            else:
                log.info("the GPU answers again")
        return fault

    def close(self) -> None:
        """Ends the thread after the query under way."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._asked_at = time.monotonic()
            try:
                self._query()
                self._error = None
            except Unavailable as error:
                self._error = str(error)
            self._asked_at = None
            self._closed.wait(self._period_s)


def device_fault(limit_s: float) -> str | None:
    """Returns why the devices do not answer, within `limit_s`; None when they do or when there is
    no driver to ask.
    """
    nvml = Nvml.load()
    if nvml is None:
        return None
    ended = threading.Event()
    errors: list[str] = []

    def ask() -> None:
        try:
            nvml.query()
        except Unavailable as error:
            errors.append(str(error))
        ended.set()

    threading.Thread(target=ask, name="device-query", daemon=True).start()
    if not ended.wait(limit_s):
        return f"no answer within {limit_s:g} s"
    return errors[0] if errors else None
