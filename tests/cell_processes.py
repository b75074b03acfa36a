"""What processes of the grid's cells do when they go wrong, where other processes find it."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from grid import Cell


def die(_cell: Cell, _threads: int, _out: Connection) -> None:
    """End the process as a crash of a solver does."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait(_cell: Cell, _threads: int, _out: Connection) -> None:
    """Never come back."""
    threading.Event().wait()
