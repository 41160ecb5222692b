"""`python tether.py PARENT_PID COMMAND...`: runs a command that cannot outlive the process that
started it.

A program of its own, run without site-packages, since code between fork and exec of a process with
threads is not safe in Python. It becomes the command (exec), so the pid and the exit status are the
command's. On Linux; elsewhere the command runs untethered.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
