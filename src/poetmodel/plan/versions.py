"""Format and versions of plan files."""

from typing import Final

FORMAT: Final = "poetmodel-plan"
VERSION: Final = 1
STATE_VERSION: Final = 2
"""Version of files of plans with homes of state."""
