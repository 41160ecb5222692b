"""Signals: the first asks for a clean stop, the second for an end at once."""

import asyncio
import signal


class Interrupt:
    """SIGINT, SIGTERM and SIGHUP of this process, as events."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.first: signal.Signals | None = None

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self.receive, each)

    def receive(self, received: signal.Signals) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.first = self.first or received
        self.asked.set()
