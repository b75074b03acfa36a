"""Write an exported folder: generated code, kernels, runtime, weights, build files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.export.kernels import (
    FORWARDING_HEADER,
    SHARED_PREFIX,
    add_licence,
    apply_prefix,
    find_included_headers,
    make_kernel_header,
    write_shared_kernels,
)
from poetmodel.export.manifest import MANIFEST, make_manifest, read_earlier_manifest
from poetmodel.export.packaging import WeightsFormat, folder_template_values, format_command
from poetmodel.export.templates import fill_template
from poetmodel.files import (
    LICENCE_FILE,
    check_writable,
    licence_text,
    raise_write_errors,
    write_bytes,
    write_text,
)
from poetmodel.lowered.kernels import SOURCES, find_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from poetmodel.export.deployment import Deployment

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
            folder, [*(name for name, _ in _list_templates()), LICENCE_FILE, MANIFEST]
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
            shared_folder, [name for name, _ in _list_template_files(SOURCES / "shared")]
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


def write_folder(deployment: Deployment) -> None:
    """Write all files of a program, those of its folder of shared kernels included.

    Deletes C files, headers and weight files (`_REPLACED_FILE`) that only an earlier export has.
    All files except shared kernels are checked to be writable before the first is written or
    deleted.
    """
    options, source = deployment.options, deployment.source
    folder, prefix, shared_path = options.folder, options.prefix, options.shared_path
    shared_kernels = (
        ()
        if shared_path is None
        else {name for name in source.kernels if not find_kernel(name).is_random}
    )
    kernels = {
        name: find_kernel(name).source for name in source.kernels if name not in shared_kernels
    }
    is_binary = options.weights is WeightsFormat.BINARY
    sources = {
        "src/pm.h": FORWARDING_HEADER.format(path="../include/pm.h"),
        "src/pm_kernels.h": make_kernel_header(kernels, shared_kernels),
        **{f"src/{name}.c": text for name, text in kernels.items()},
        **dict(find_included_headers(kernels.values())),
    }
    if prefix == "pm":
        sources["include/pm_step.h"] = FORWARDING_HEADER.format(path="pm.h")
    values = {
        **folder_template_values(deployment),
        **source.template_values(),
        "COMMAND": "@COMMAND@",
    }
    templates = (template for template in _list_templates() if _is_needed(template[0], deployment))
    sources |= {name: fill_template(text, values) for name, text in templates}
    texts = {
        apply_prefix(name, prefix): add_licence(name, apply_prefix(text, prefix))
        for name, text in sources.items()
    }
    texts["README.md"] = texts["README.md"].replace("@COMMAND@", format_command(options.command))
    texts[LICENCE_FILE] = licence_text()
    binary_files = (
        {apply_prefix("src/pm_weights.bin", prefix): source.weights.data} if is_binary else {}
    )
    names = sorted((*texts, *binary_files, MANIFEST))
    texts[MANIFEST] = make_manifest(deployment, names)
    with raise_write_errors(folder):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        check_writable(folder / name)
    with raise_write_errors(folder):
        for name in _list_earlier_files(folder):
            if name not in names:
                (folder / name).unlink(missing_ok=True)
    if shared_path is not None:
        write_shared_kernels(folder / shared_path, shared_kernels)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name, content in binary_files.items():
        write_bytes(folder / name, content)


def _list_earlier_files(folder: Path) -> Iterator[str]:
    """Yield the files in the manifest of an earlier export that match `_REPLACED_FILE`."""
    names = read_earlier_manifest(folder).get("files")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and _REPLACED_FILE.fullmatch(name):
            yield name


_REPLACED_FILE: Final = re.compile(r"(src|include|examples/Train)/[a-z0-9_]+\.(c|h|bin)")
"""Files to delete if a new export lacks them, because a build would compile or include them."""


def _list_templates() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of all templates of an exported folder, which `_is_needed` filters."""
    yield from _list_template_files(SOURCES)
    yield from _list_template_files(SOURCES / "generated")


def _list_template_files(folder: Traversable, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each file below a folder, paths relative to it, after `parent`."""
    for path in folder.iterdir():
        name = f"{parent}{path.name}"
        if path.is_file():
            yield name, path.read_text(encoding="utf-8")
        elif name not in {"generated", "kernels", "shared"}:
            yield from _list_template_files(path, f"{name}/")


def _is_needed(name: str, deployment: Deployment) -> bool:
    """Return whether an exported folder has the file of the template `name`."""
    conditions = {
        "src/pm_commit.c": deployment.commit,
        "src/pm_replay.c": deployment.replay,
        "src/pm_migrate.c": deployment.migration,
        "src/pm_groups.h": deployment.replay or deployment.migration,
        "examples/Train/storage.c": deployment.uses_storage,
        "examples/Train/flash.c": deployment.copies_to_flash,
    }
    return name != "pm_driver.h" and bool(conditions.get(name, True))
