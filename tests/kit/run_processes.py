"""Failures of worker processes of benchmark runs, in a module that these processes can import."""

import os
import signal
import threading

from harness import make_record


def kill_process(*_, **__):
    """Kill this process by a signal, as a crash of a solver does."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_forever(*_, **__):
    """Wait forever, as a solver that hangs."""
    threading.Event().wait()


def make_record(fields, _start, **_):
    """Return the record of a successful training run; `fields` are those of its cell."""
    facts = {"cell": fields, "status": "ran", "seconds": 1.0, "heap_peak_bytes": 100}
    return make_record("training", fields["method"], **facts)
