"""The query of NVIDIA's management library, and the time that one query may take."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipelinerl_common.errors import Unavailable
from pipelinerl_weights import device_watch
from pipelinerl_weights.device_watch import Nvml, device_fault

UUIDS = (b"GPU-aa", b"GPU-bb")
NOT_FOUND, GPU_IS_LOST = 6, 15
TEXTS = {NOT_FOUND: b"Not Found", GPU_IS_LOST: b"GPU is lost"}


def library(*, lost: int = -1, asked: list[int] | None = None) -> Any:
    """The functions of a machine with two devices, one of them lost."""

    def find(handle: Any, index: int) -> int:
        if index not in range(len(UUIDS)):
            return NOT_FOUND
        handle._obj.value = index + 1
        return 0

    def by_uuid(uuid: bytes, handle: Any) -> int:
        return find(handle, UUIDS.index(uuid) if uuid in UUIDS else -1)

    def memory(handle: ctypes.c_void_p, out: Any) -> int:
        index = (handle.value or 0) - 1
        out._obj.total = 80 << 30
        if asked is not None:
            asked.append(index)
        return GPU_IS_LOST if index == lost else 0

    def count(out: Any) -> int:
        out._obj.value = len(UUIDS)
        return 0

    class Functions:
        """Functions by name, as ctypes.CDLL has them."""

    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit_v2": lambda: 0,
        "nvmlErrorString": lambda result: TEXTS[result],
        "nvmlDeviceGetCount_v2": count,
        "nvmlDeviceGetHandleByIndex_v2": lambda index, out: find(out, index.value),
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetMemoryInfo": memory,
    }
    for name, function in functions.items():
        setattr(Functions, name, staticmethod(function))
    return Functions


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, [0, 1]), ("1", [1]), ("GPU-bb, 0", [1, 0]), ("", []), ("0,-1,1", [0])],
)
def test_the_devices_that_the_process_sees_are_asked(
    visible: str | None, devices: list[int]
) -> None:
    asked: list[int] = []
    Nvml(library(asked=asked), visible).query()
    assert asked == devices


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("1", "device 1: GPU is lost"),
        ("0,GPU-bb", "device GPU-bb: GPU is lost"),
        ("7", "Not Found"),
    ],
)
def test_a_lost_device_is_named_in_the_words_of_the_driver(visible: str, message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        Nvml(library(lost=1), visible).query()


def test_a_query_that_never_returns_is_a_fault_after_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    hanging = library()
    hanging.nvmlInit_v2 = lambda: int(not released.wait(60))
    monkeypatch.setattr(device_watch.Nvml, "load", lambda: Nvml(hanging, None))
    began = time.monotonic()
    assert device_fault(0.2) == "no answer within 0.2 s"
    assert time.monotonic() - began < 10
    released.set()
    assert device_fault(30) is None
    monkeypatch.setattr(device_watch.Nvml, "load", lambda: Nvml(library(lost=0), None))
    assert device_fault(30) == "device 0: GPU is lost"
    monkeypatch.setattr(device_watch.Nvml, "load", lambda: None)
    assert device_fault(30) is None
