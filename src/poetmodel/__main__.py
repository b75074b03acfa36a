"""``python -m poetmodel``: the same as the command ``poetmodel``."""

from poetmodel.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # After Ctrl-C in code compiled from a string, such as a dataclass method, Python exits by
        # the signal instead of with the exit status, unless such code is executed again.
        exec("")  # noqa: S102
