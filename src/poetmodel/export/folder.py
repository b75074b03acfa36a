"""Write an exported folder: generated code, kernels, runtime, weights, build files.

``manifest.json`` describes the folder for programs, ``README.md`` for users.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

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
from poetmodel.export.migration import describe_samples, list_state_pieces
from poetmodel.export.packaging import WeightsFormat, folder_template_values, format_command
from poetmodel.export.replay import program_instructions, replay_arena_bytes, sample_tensor_names
from poetmodel.export.reserves import input_bytes, reserved_bytes
from poetmodel.export.templates import fill_template
from poetmodel.files import check_writable, raise_write_errors, write_bytes, write_text
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.kernels import SOURCES, find_kernel
from poetmodel.lowered.ranges import number_check_instructions
from poetmodel.lowered.tables import BYTE_VALUES, find_tables
from poetmodel.schedule import GraphIdentity
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep

_PREFIX_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]*")
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = "poetmodel-export"
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
        (ancestor for ancestor in folder.resolve().parents if _read_manifest(ancestor)), None
    )
    if outer_folder is not None:
        raise InputError(
            f"{folder}: is inside {outer_folder}, which is an exported folder, and builds of that "
            "would find its files; choose a folder outside of it"
        )
    if not _read_manifest(folder):
        _check_absent_files(folder, [*(name for name, _ in _list_templates()), _MANIFEST])


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
    check_writable(existing_folder / _MANIFEST)


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
    binary_files = (
        {apply_prefix("src/pm_weights.bin", prefix): source.weights.data} if is_binary else {}
    )
    names = sorted((*texts, *binary_files, _MANIFEST))
    texts[_MANIFEST] = make_manifest(deployment, names)
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
    names = _read_manifest(folder).get("files")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and _REPLACED_FILE.fullmatch(name):
            yield name


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an earlier export in a folder; {} if missing, invalid or foreign."""
    try:
        document = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(document, dict) and document.get("format") == _FORMAT
    return document if is_ours else {}


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


def make_manifest(deployment: Deployment, names: Sequence[str]) -> str:
    """Return the text of ``manifest.json``; sizes are those of the single-precision build."""
    step, arena, plan = deployment.step, deployment.arena, deployment.plan
    identity = GraphIdentity.from_graph(step.graph)
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": 1,
        "prefix": deployment.options.prefix,
        "shared_kernels": deployment.options.shared_path,
        "graph": {"name": identity.name, "sha256": identity.sha256},
        **_exactness_keys(step),
        "device": plan.device,
        "budget": {"ram_bytes": deployment.ram_bytes, "arena_bytes": deployment.arena_bytes},
        "arena_bytes_of": {
            "step": arena.bytes,
            **{
                forward_pass.kind: forward_pass.end_bytes
                for forward_pass in deployment.forward_passes
            },
        },
        **_tile_keys(deployment),
        "ram": deployment.ram_map(),
        "flash": deployment.flash_map(),
        "arena": arena.to_dict(),
        "alignment": arena.alignment,
        "learning_rate": step.learning_rate,
        "updates": step.learning_rate is not None,
        **({"accumulate": step.accumulate} if step.accumulate > 1 else {}),
        "commit": deployment.commit,
        **({"commits_to": "flash"} if deployment.copies_to_flash else {}),
        **({"commit_every": deployment.commit_every} if deployment.commit_every > 1 else {}),
        "memory_mapped": plan.memory_mapped,
        "mode": str(plan.mode),
        "status": str(deployment.result.status),
        **_cycle_keys(deployment),
        "input_checks": {"instructions": number_check_instructions(step)},
        "inputs": [{**_tensor_keys(tensor), **_table_keys(step, tensor)} for tensor in step.inputs],
        "outputs": [_tensor_keys(tensor) for tensor in _find_outputs(step)],
        "states": [
            {
                **_tensor_keys(tensor),
                "home": _format_home(tensor, deployment),
                "pieces": len(tensor.pieces),
            }
            for tensor in step.states
        ],
        "gradients": [_tensor_keys(tensor) for tensor in step.gradients],
        **_evaluation_keys(deployment),
        **_replay_keys(deployment),
        **_generation_keys(deployment),
        "slots": list(deployment.slots),
        "nodes": [
            {"name": node.name, "op": node.op, "kernels": [call.kernel for call in calls]}
            for node, calls in zip(step.graph.nodes, step.calls, strict=True)
        ],
        "program": [[str(op), index] for op, index in plan.program],
        "tensors": [tensor.name for tensor in step.graph.tensors],
        "versions": {"poetmodel": __version__, **step.versions},
        "command": deployment.options.command,
        "files": list(names),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def summarize(deployment: Deployment) -> dict[str, Any]:
    """Return a summary of a deployment for JSON: tiles, RAM, flash, storage, wear and solve."""
    return {
        "graph": deployment.step.graph.name,
        **_exactness_keys(deployment.step),
        "device": deployment.plan.device,
        "ram_bytes": deployment.ram_bytes,
        **_tile_keys(deployment),
        "ram": deployment.ram_map(),
        "flash": deployment.flash_map(),
        "arena_bytes": deployment.arena_bytes,
        "arena_lower_bound_bytes": deployment.arena.lower_bound_bytes,
        "slots": len(deployment.slots),
        "stored_bytes": deployment.stored_bytes,
        "written_bytes": deployment.written_bytes,
        "steps_until_worn": deployment.steps_until_worn,
        **_cycle_keys(deployment),
        "schedule": deployment.result.to_dict(),
    }


def _tile_keys(deployment: Deployment) -> dict[str, Any]:
    """Return the keys for tiles: their size, and the trials of all tried sizes, if any."""
    trials = [trial.to_dict() for trial in deployment.tile_trials]
    return {"tile_bytes": deployment.tile_bytes, **({"tile_trials": trials} if trials else {})}


def _cycle_keys(deployment: Deployment) -> dict[str, Any]:
    """Return the key ``cycles``, the model that converts instructions to times, if there is one."""
    model = deployment.result.problem.costs.cycles
    return {} if model is None else {"cycles": model.to_dict()}


def _evaluation_keys(deployment: Deployment) -> dict[str, Any]:
    if deployment.evaluation is None:
        return {}
    results = ["loss", *["correct"] * deployment.counts_correct]
    return {"evaluation": {"gives": results, "keeps_best": deployment.stores_best}}


def _generation_document(deployment: Deployment) -> dict[str, Any]:
    """Return the value of the key ``generation``: the layout of a generation."""
    tensors, buffers = list(deployment.generation_names), deployment.step.buffers
    states: dict[str, Any] = {}
    for tensor in deployment.step.states:
        pieces = list(list_state_pieces(deployment.step, tensor))
        if all(name in tensors for name, _, _ in pieces):
            states[tensor.name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.type),
                "pieces": [[tensors.index(name), offset, count] for name, offset, count in pieces],
            }
    return {
        "step_id": deployment.identity[:8],
        "layout_id": deployment.layout_id,
        "instance_id": deployment.instance_id,
        "commit_unit": deployment.layout.write_unit_bytes,
        "commit_block": deployment.layout.erase_block_bytes,
        "checksums": deployment.options.checksum,
        "generations": deployment.generations,
        "best": deployment.stores_best,
        "samples": describe_samples(deployment.step, deployment.replay),
        "page_bytes": list(deployment.page_bytes),
        "stored_bytes": deployment.stored_bytes,
        "in_flash": deployment.copies_to_flash,
        "tensor_bytes": [buffers[name].bytes for name in tensors],
        "states": states,
    }


def _replay_keys(deployment: Deployment) -> dict[str, Any]:
    """Return the key ``replay``: sizes of samples and their groups, and two kinds of steps."""
    replay, step = deployment.replay, deployment.step
    if replay is None:
        return {}
    plan, front = deployment.plan, replay.front
    reserved_ram_bytes = reserved_bytes(step, deployment.stack_bytes, replay)
    other_input_bytes = input_bytes(step) - replay.input_bytes
    stored_step_bytes = replay_arena_bytes(replay, step, plan, deployment.arena)
    return {
        "replay": {
            "samples": replay.max_samples,
            "sample_bytes": replay.sample_bytes,
            "holds": list(sample_tensor_names(step, front)),
            "sample_id": front.identify(step)[:8],
            "stored_bytes": replay.stored_bytes,
            "group_samples": replay.samples_per_group,
            "group_bytes": replay.group_bytes,
            "step": {
                "ram_bytes": deployment.arena_bytes + reserved_ram_bytes,
                "instructions": program_instructions(step, plan) + number_check_instructions(step),
                "nodes": len(step.graph.nodes),
            },
            "stored_step": {
                "ram_bytes": stored_step_bytes + reserved_ram_bytes - other_input_bytes,
                "instructions": program_instructions(step, plan, front.nodes),
                "nodes": len(step.graph.nodes) - len(front.nodes),
            },
        }
    }


def _generation_keys(deployment: Deployment) -> dict[str, Any]:
    """Return the keys ``generation`` and ``migrates``, if any."""
    if not deployment.generation_names:
        return {}
    keys: dict[str, Any] = {"generation": _generation_document(deployment)}
    migration = deployment.migration
    if migration is not None:
        keys["migrates"] = {
            "step_id": migration.source["step_id"],
            "taken": list(migration.migrated),
            "anew": list(migration.reset),
            "left": list(migration.dropped),
            "samples": migration.takes_samples,
        }
    return keys


def _exactness_keys(step: LoweredStep) -> dict[str, str]:
    """Return the key ``exactness``, that of the graph; {} for a step that is float throughout."""
    return {"exactness": step.graph.exactness} if step.graph.exactness else {}


def _find_outputs(step: LoweredStep) -> Iterator[NamedTensor]:
    if step.inference is not None and step.inference.output is not None:
        yield step.inference.output


def _tensor_keys(tensor: NamedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.type.numpy_name,
        "bytes": tensor.elements * tensor.type.itemsize,
    }


def _table_keys(step: LoweredStep, tensor: NamedTensor) -> dict[str, Any]:
    """Return the key ``tables``, the tables that convert input `tensor`; {} without any."""
    if tensor.type is DataType.REAL:
        return {}
    names = find_tables(step, tensor)
    rows = [step.values[name].reshape(-1, BYTE_VALUES).astype(float).tolist() for name in names]
    return {"tables": [[_encode_numbers(row) for row in table] for table in rows]} if rows else {}


def _encode_numbers(numbers: Sequence[float]) -> list[float | str]:
    """Return numbers for JSON, with strings in place of numbers that are not finite."""
    return [number if math.isfinite(number) else str(number) for number in numbers]


def _format_home(tensor: NamedTensor, deployment: Deployment) -> str:
    """Return the home of a state tensor; the homes joined by + if those of its tiles differ."""
    return "+".join(sorted({deployment.home_of(ref.buffer) for ref in tensor.pieces}))
