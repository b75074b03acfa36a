"""Headers of JSON files: the version of the format, and the version of poetmodel that wrote them.

Files of one format version can be read by all versions of poetmodel that know it: unknown keys at
the top level are ignored with a note, all other unknown keys are errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, quote
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WRITTEN_BY: Final = "written_by"
"""Key of the version of poetmodel that wrote a file. No digest of a file's content includes it."""
THIS_VERSION: Final = f"poetmodel {__version__}"
"""Value of `WRITTEN_BY` in files that this version writes."""


def describe_writer(document: Mapping[str, Any]) -> str:
    """Return a clause that states which version wrote a file, and which one this is."""
    writer = document.get(WRITTEN_BY)
    if writer is None and isinstance(document.get("versions"), dict):  # a manifest of an export
        package_version = document["versions"].get("poetmodel")
        writer = None if package_version is None else f"poetmodel {package_version}"
    if writer is None:
        return f"the file does not say which version wrote it, this is {THIS_VERSION}"
    is_plain = isinstance(writer, str) and writer.isprintable() and len(writer) <= 40  # noqa: PLR2004
    return (
        f"the file was written by {writer if is_plain else quote(writer)}, this is {THIS_VERSION}"
    )


def check_version(document: object, versions: Iterable[int]) -> None:
    """Raise `InputError` if a file has a later format version than those in `versions`.

    Accepts all else, also a document without a version, which other checks report.
    """
    if not isinstance(document, dict):
        return
    version, known_versions = document.get("version"), sorted(versions)
    if type(version) is int and version > known_versions[-1]:
        raise InputError(
            f"version: expected {' or '.join(map(str, known_versions))}, got {quote(version)}: "
            f"{describe_writer(document)}; install a version that reads this format"
        )


def ignored_keys_note(keys: Iterable[str], document: Mapping[str, Any]) -> str:
    """Return the note that unknown keys at the top level of a file are ignored."""
    names = [quote(key) for key in keys]
    noun = "unknown key" if len(names) == 1 else "unknown keys"
    return f"{noun} {', '.join(names)} ignored: {describe_writer(document)}"
