"""``python -m poetmodel``: the same as the command ``poetmodel``."""

from poetmodel.cli import main

if __name__ == "__main__":
    main()
