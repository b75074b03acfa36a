"""Format and versions of plan files."""

from typing import Final

FORMAT: Final = "poetmodel-plan"
"""Value of ``format`` in plan files."""
VERSION: Final = 1
"""Version of plan files without homes of state."""
VERSION_WITH_STATE: Final = 2
"""Version of plan files with homes of state."""
