"""The command line, with commands such as ``poetmodel solve``."""

from poetmodel.cli.entry import main

__all__ = ["main"]
