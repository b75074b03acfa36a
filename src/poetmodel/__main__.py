"""``python -m poetmodel``: the same as the command ``poetmodel``."""

from poetmodel.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # Python ends by the signal, not with the status, where Ctrl-C came inside of code that was
        # made of text, as dataclasses are, and none was run after it.
        exec("")  # noqa: S102
