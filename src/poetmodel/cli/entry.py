"""Entry point of the command line; it imports the application when called."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Final

from poetmodel.errors import INTERRUPTED, SOLVER_THREAD

_REPEAT_S: Final = 0.02
"""Time after which a Ctrl-C that Python ignored is repeated [s]."""


def main() -> None:
    """Run the command line and exit with the status of the command.

    Opens the null device for closed standard streams, and restarts ``-OO`` as ``-O``. The exit does
    not wait for a solver thread that has been abandoned.
    """
    start_s = time.monotonic()
    sys.unraisablehook = _repeat_ignored_ctrl_c
    try:
        _open_closed_streams()
        if sys.flags.optimize > 1:
            _restart_with_docstrings()
        from poetmodel.cli.application import app

        app(prog_name="poetmodel", obj=start_s)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ImportError, RuntimeError) as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(INTERRUPTED)  # Ctrl-C during a class definition or the import of a C module
    except SystemExit as exit_error:
        if any(thread.name == SOLVER_THREAD for thread in threading.enumerate()):
            # An abandoned solver thread may never end. All output is written: do not wait for it.
            os._exit(exit_error.code if isinstance(exit_error.code, int) else 1)
        raise


def _repeat_ignored_ctrl_c(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that Python ignores, as in callbacks of weak references: each import has one.

    Other exceptions are printed, as Python does.
    """
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    if sys.platform == "win32":
        interrupt = partial(signal.raise_signal, signal.SIGINT)
    repeat = threading.Timer(_REPEAT_S, interrupt)
    repeat.daemon = True
    repeat.start()


def _open_closed_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr (``>&-``).

    Otherwise the next opened files get these descriptors, and printed text is written to them.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is `descriptor`
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def _restart_with_docstrings() -> None:
    """Restart the process with ``PYTHONOPTIMIZE=1``: help texts and Pyomo need docstrings."""
    environment = os.environ | {"PYTHONOPTIMIZE": "1"}
    sys.stdout.flush()
    os.execve(  # noqa: S606 - this program with the same arguments
        sys.executable, [sys.executable, "-m", "poetmodel", *sys.argv[1:]], environment
    )
