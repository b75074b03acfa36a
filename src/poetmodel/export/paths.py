"""Checks of the folders and the prefix of an export."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.export.kernels import SHARED_PREFIX
from poetmodel.export.manifest import MANIFEST, read_earlier_manifest
from poetmodel.export.templates import list_template_files, list_templates
from poetmodel.files import LICENCE_FILE, check_writable, raise_write_errors
from poetmodel.lowered.kernels import SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PREFIX_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_PREFIXES: Final = re.compile(
    r"arduino|assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|pthread|"
    r"setjmp|signal|std(align|arg|atomic|bool|def|int|io|lib|noreturn)|strings?|tgmath|threads|"
    r"time|uchar|unistd|w(char|ctype)|"  # headers
    r"all|clean|edit_cache|help|install|m|package|rebuild_cache|test"  # CMake targets, a library
)
"""Prefixes that clash with the name of a standard header, a CMake target or a library."""


def check_folder(folder: Path) -> None:
    """Raise `InputError` unless an export could be written to a folder; a temporary file is.

    The folder must not be inside another exported folder and, unless it contains an earlier export,
    have no manifest and no file with the path of a template.
    """
    _check_folder_writable(folder)
    outer_folder = next(
        (ancestor for ancestor in folder.resolve().parents if read_earlier_manifest(ancestor)), None
    )
    if outer_folder is not None:
        raise InputError(
            f"{folder}: is inside {outer_folder}, which is an exported folder, and builds of that "
            "would find its files; choose a folder outside of it"
        )
    if not read_earlier_manifest(folder):
        _check_absent_files(
            folder, [*(name for name, _ in list_templates()), LICENCE_FILE, MANIFEST]
        )


def check_shared_folder(shared_folder: Path, folder: Path) -> None:
    """Raise `InputError` unless `shared_folder` can contain kernels of the step in `folder`."""
    _check_folder_writable(shared_folder)
    if shared_folder.resolve() == folder.resolve():
        raise InputError(
            f"{shared_folder}: expected another folder for shared kernels than for the step"
        )
    if not (shared_folder / "include" / f"{SHARED_PREFIX}_kernels.h").is_file():
        _check_absent_files(
            shared_folder, [name for name, _ in list_template_files(SOURCES / "shared")]
        )


def _check_folder_writable(folder: Path) -> None:
    """Raise `InputError` unless a folder, or its nearest parent, takes a temporary file."""
    with raise_write_errors(folder):
        existing_folder = next(
            ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.exists()
        )
        if not existing_folder.is_dir():
            raise InputError(
                f"{folder}: expected a folder to write, and {existing_folder} is a file"
            )
    check_writable(existing_folder / MANIFEST)


def _check_absent_files(folder: Path, names: Sequence[str]) -> None:
    """Raise `InputError` if a file of `names` exists in the folder."""
    with raise_write_errors(folder):
        present_name = next((name for name in sorted(names) if (folder / name).is_file()), None)
    if present_name is not None:
        raise InputError(
            f"{folder}: holds {present_name}, which no export has written there; choose another "
            "folder"
        )


def check_prefix(prefix: object) -> None:
    """Raise `InputError` unless `prefix` is a string that is a valid prefix of names in C.

    It has small letters, digits and underscores, and begins with a letter. Names of headers, build
    targets and libraries, and the prefix of shared kernels are not valid.
    """
    if not (isinstance(prefix, str) and _PREFIX_PATTERN.fullmatch(prefix)):
        raise InputError(
            f"prefix: expected small letters, digits and underscores after a letter, such as kws, "
            f"got {prefix!r}"
        )
    if _RESERVED_PREFIXES.fullmatch(prefix):
        raise InputError(
            f"prefix: {prefix} is the name of a header, a build target or a library already; "
            "choose another one"
        )
    if prefix == SHARED_PREFIX:
        raise InputError(f"prefix: {prefix} is that of shared kernels; choose another one")
