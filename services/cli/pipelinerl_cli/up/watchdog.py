"""`python watchdog.py`: ends process groups when the process that feeds its standard input has
ended, however that happened.

It reads group ids, one a line: "123" adds one, "-123" takes it back. The tether ends a service with
its parent; this ends what the service has started itself, such as an engine's workers. A program of
its own, run without site-packages.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with its input
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
