"""The entry point, which loads the application only when it is called."""

from __future__ import annotations

import sys
from typing import Final

INTERRUPTED: Final = 130
"""Exit status of Ctrl-C where there is nothing to keep."""


def main() -> None:
    """Run the command line and exit; Ctrl-C while it loads ends it without a traceback."""
    try:
        from poetmodel.cli.application import app

        app(prog_name="poetmodel")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
