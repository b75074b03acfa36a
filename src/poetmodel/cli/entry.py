"""The entry point; it loads the application only when it is called."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final

from poetmodel.errors import INTERRUPTED

SOLVING: Final = "poetmodel-solve"
"""Name of the threads in which solvers run."""


def main() -> None:
    """Run the command line and exit, without a traceback if Ctrl-C comes while it loads."""
    begun_s = time.monotonic()
    try:
        _open_closed_streams()
        if sys.flags.optimize > 1:
            _keep_docstrings()
        from poetmodel.cli.application import app

        app(prog_name="poetmodel", obj=begun_s)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ImportError, RuntimeError) as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(INTERRUPTED)  # Ctrl-C while a class was made, or a module in C was loaded
    except SystemExit as end:
        if any(thread.name == SOLVING for thread in threading.enumerate()):
            # A solver that was left behind looks at no clock: the answer is written, so end here.
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _open_closed_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr (``>&-``).

    Otherwise the next files that are opened get these descriptors, and printed text goes there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _keep_docstrings() -> None:
    """Start again without ``-OO``, which strips the docstrings that help and Pyomo need."""
    environment = os.environ | {"PYTHONOPTIMIZE": "1"}
    sys.stdout.flush()
    os.execve(  # noqa: S606 - this program, with the arguments that it was given
        sys.executable, [sys.executable, "-m", "poetmodel", *sys.argv[1:]], environment
    )
