"""Format and versions of plan files."""

from typing import Final

FORMAT: Final = "poetmodel-plan"
VERSION: Final = 1
VERSION_OF_STATE: Final = 2
"""Version of the files of plans that state the homes of state."""
