"""Waiting for other processes on a machine that may be busy."""

import os
import time

PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy [s]."""


def until(condition):
    """Wait until something holds; return whether it came to that."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def gone(pid):
    """Return whether there is no such process, not even one that waits to be heard of."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
