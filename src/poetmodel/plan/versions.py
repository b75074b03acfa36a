"""Format and versions of plan files."""

from typing import Final

FORMAT: Final = "poetmodel-plan"
VERSION: Final = 1
VERSION_WITH_STATE: Final = 2
"""Version of files of plans with homes of state."""
