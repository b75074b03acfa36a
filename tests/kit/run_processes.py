"""Failures of worker processes of benchmark runs, in a module that these processes can import."""

import os
import signal
import threading


def kill_process(*_, **__):
    """Kill this process by a signal, like a crash of a solver."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_forever(*_, **__):
    """Wait forever, as a solver that hangs."""
    threading.Event().wait()
