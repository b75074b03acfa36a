"""Sentences in which hand-written pages quote numbers of the records: page, and what it must say.

A name in braces is one of `tables.claims`; spaces and line ends count alike.
"""

from __future__ import annotations

from typing import Final

QUOTES: Final[tuple[tuple[str, str], ...]] = ()
