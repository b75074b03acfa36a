"""The command line: ``poetmodel solve``, ``inspect``, ``verify``, ``models``, ``devices``."""

from poetmodel.cli.entry import main

__all__ = ["main"]
