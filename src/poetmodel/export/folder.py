"""Write an exported folder: generated code, kernels, runtime, weights, build files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.export.kernels import (
    FORWARDING_HEADER,
    add_licence,
    apply_prefix,
    find_included_headers,
    make_kernel_header,
    write_shared_kernels,
)
from poetmodel.export.manifest import MANIFEST, read_earlier_manifest
from poetmodel.export.options import WeightsFormat
from poetmodel.export.packaging import folder_template_values, format_command
from poetmodel.export.summary import make_manifest
from poetmodel.export.templates import fill_template, list_templates
from poetmodel.files import (
    LICENCE_FILE,
    check_writable,
    licence_text,
    raise_write_errors,
    write_bytes,
    write_text,
)
from poetmodel.lowered.kernels import find_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poetmodel.export.deployment import Deployment


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
    templates = (template for template in list_templates() if _is_needed(template[0], deployment))
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


def _is_needed(name: str, deployment: Deployment) -> bool:
    """Return whether an exported folder has the file of the template `name`."""
    conditions = {
        "src/pm_commit.c": deployment.commit,
        "src/pm_mapped.c": deployment.source.program.updates_mapped_state,
        "src/pm_replay.c": deployment.replay,
        "src/pm_migrate.c": deployment.migration,
        "src/pm_groups.h": deployment.replay or deployment.migration,
        "examples/Train/storage.c": deployment.uses_storage,
        "examples/Train/flash.c": deployment.copies_to_flash,
    }
    return name != "pm_driver.h" and bool(conditions.get(name, True))
