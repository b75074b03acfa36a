"""Fixtures of the tests of exported C: compiled files."""

from kit.shared_objects import share_compiled_files

__all__ = ["share_compiled_files"]
