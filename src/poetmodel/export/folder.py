"""The folder that is exported: generated code, the kernels that it calls, runtime, weights.

``manifest.json`` and ``README.md`` say what it holds, for programs and for people.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError
from poetmodel.export.deployment import WeightsFormat, input_bytes, reserved_bytes
from poetmodel.export.identity import front_identity
from poetmodel.export.kernels import (
    FORWARDING,
    SHARED,
    headers,
    licensed,
    prototypes,
    renamed,
    write_shared,
)
from poetmodel.export.migration import state_pieces
from poetmodel.export.packaging import command_block, folder_words
from poetmodel.export.replay import instructions_of, rows_of, stored_arena_bytes
from poetmodel.export.source import StepSource
from poetmodel.export.templates import fill_template
from poetmodel.files import check_writable, raise_write_errors, write_bytes, write_text
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.kernels import RANDOM, SOURCES, kernel_source
from poetmodel.lowered.step import Weights
from poetmodel.lowered.tables import BYTES, tables_of
from poetmodel.schedule import GraphIdentity
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep

_PREFIX: Final = re.compile(r"[a-z][a-z0-9_]*")
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = "poetmodel-export"
_TAKEN: Final = re.compile(
    r"arduino|assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|pthread|"
    r"setjmp|signal|std(align|arg|atomic|bool|def|int|io|lib|noreturn)|strings?|tgmath|threads|"
    r"time|uchar|unistd|w(char|ctype)|"  # headers
    r"all|clean|edit_cache|help|install|m|package|rebuild_cache|test"  # of CMake
)
"""Headers that the step's own would hide, targets and libraries that cannot be the step's."""


def check_folder(folder: Path) -> None:
    """Raise unless a folder could be written: over an earlier export, and inside of none."""
    _check_folder(folder)
    outer = next((above for above in folder.resolve().parents if _manifest(above)), None)
    if outer is not None:
        raise InputError(
            f"{folder}: lies inside {outer}, which is an exported folder, and builds of that would "
            "find its files; choose a folder outside of it"
        )
    if not _manifest(folder):
        _check_empty(folder, [*(name for name, _ in _templates()), _MANIFEST])


def check_shared(shared: Path, folder: Path) -> None:
    """Raise unless kernels that the step of a folder shares could be written to another one."""
    _check_folder(shared)
    if shared.resolve() == folder.resolve():
        raise InputError(f"{shared}: expected another folder for shared kernels than for the step")
    if not (shared / "include" / f"{SHARED}_kernels.h").is_file():
        _check_empty(shared, [name for name, _ in _copied(SOURCES / "shared")])


def _check_folder(folder: Path) -> None:
    with raise_write_errors(folder):
        there = next(
            ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.exists()
        )
        if not there.is_dir():
            raise InputError(f"{folder}: expected a folder to write, and {there} is a file")
    check_writable(there / _MANIFEST)


def _check_empty(folder: Path, names: Sequence[str]) -> None:
    """Raise if a folder has files of these names, which somebody else has written."""
    with raise_write_errors(folder):
        there = next((name for name in sorted(names) if (folder / name).is_file()), None)
    if there is not None:
        raise InputError(
            f"{folder}: holds {there}, which no export has written there; choose another folder"
        )


def check_prefix(prefix: str) -> None:
    """Raise unless names of C may begin like this."""
    if not _PREFIX.fullmatch(str(prefix)):
        raise InputError(
            f"prefix: expected small letters, digits and underscores after a letter, such as kws, "
            f"got {prefix!r}"
        )
    if _TAKEN.fullmatch(prefix):
        raise InputError(
            f"prefix: {prefix} is the name of a header or a library already; choose another one"
        )
    if prefix == SHARED:
        raise InputError(f"prefix: {prefix} is that of shared kernels; choose another one")


def write_folder(deployment: Deployment, folder: Path, *, command: str) -> None:
    """Write all files of a deployment; those of an earlier one are replaced."""
    values = Weights.of(deployment.step)
    source = StepSource(deployment, values)
    shared = () if deployment.shared_kernels is None else set(source.kernels) - RANDOM
    kernels = {name: kernel_source(name) for name in source.kernels if name not in shared}
    binary = deployment.weights is WeightsFormat.BINARY
    code = {
        "src/pm.h": FORWARDING.format(path="../include/pm.h"),
        "src/pm_kernels.h": prototypes(kernels, shared),
        **{f"src/{name}.c": text for name, text in kernels.items()},
        **dict(headers(kernels.values())),
    }
    if deployment.prefix == "pm":
        code["include/pm_step.h"] = FORWARDING.format(path="pm.h")
    words = {**folder_words(deployment), **source.words(), "COMMAND": "@COMMAND@"}
    needed = (each for each in _templates() if _is_needed(each[0], deployment))
    code |= {name: fill_template(text, words) for name, text in needed}
    texts = {
        renamed(name, deployment.prefix): licensed(name, renamed(text, deployment.prefix))
        for name, text in code.items()
    }
    texts["README.md"] = texts["README.md"].replace("@COMMAND@", command_block(command))
    data = {renamed("src/pm_weights.bin", deployment.prefix): values.data} if binary else {}
    names = sorted((*texts, *data, _MANIFEST))
    texts[_MANIFEST] = manifest(deployment, source, command=command, names=names)
    with raise_write_errors(folder):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        check_writable(folder / name)
    with raise_write_errors(folder):
        for name in _written_before(folder):
            if name not in names:
                (folder / name).unlink(missing_ok=True)
    if deployment.shared_kernels is not None:
        write_shared(folder / deployment.shared_kernels, shared)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name, content in data.items():
        write_bytes(folder / name, content)


def _written_before(folder: Path) -> Iterator[str]:
    """Yield the files that an earlier export has written to a folder and that are C or headers."""
    names = _manifest(folder).get("files")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and _FILE_OF_OURS.fullmatch(name):
            yield name


def _manifest(folder: Path) -> dict[str, Any]:
    """Return what an earlier export says that it is; nothing where there is none."""
    try:
        document = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = isinstance(document, dict) and document.get("format") == _FORMAT
    return document if known else {}


_FILE_OF_OURS: Final = re.compile(r"(src|include|examples/Train)/[a-z0-9_]+\.(c|h|bin)")
"""What another export may leave out: it would be compiled, or found, if it stayed."""


def _templates() -> Iterator[tuple[str, str]]:
    """Yield the paths and the texts of all templates; words make code of those in ``generated``."""
    yield from _copied(SOURCES)
    yield from _copied(SOURCES / "generated")


def _copied(folder: Traversable, below: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths, and the texts, of the files below a folder that each step has."""
    for path in folder.iterdir():
        name = f"{below}{path.name}"
        if path.is_file():
            yield name, path.read_text(encoding="utf-8")
        elif name not in {"generated", "kernels", "shared"}:
            yield from _copied(path, f"{name}/")


def _is_needed(name: str, deployment: Deployment) -> bool:
    """Return whether a folder has a file; `pm_driver.h` is a part of its header."""
    needed = {
        "src/pm_commit.c": deployment.commit,
        "src/pm_replay.c": deployment.replay,
        "src/pm_migrate.c": deployment.migration,
        "examples/Train/storage.c": deployment.uses_storage,
        "examples/Train/flash.c": deployment.saves,
    }
    return name != "pm_driver.h" and bool(needed.get(name, True))


def manifest(
    deployment: Deployment, source: StepSource, *, command: str, names: Sequence[str]
) -> str:
    """Return the text of ``manifest.json``; sizes are those of the build for float."""
    step, arena, plan = deployment.step, deployment.arena, deployment.plan
    identity = GraphIdentity.of(step.graph)
    result = deployment.result
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": 1,
        "prefix": deployment.prefix,
        "shared_kernels": deployment.shared_kernels,
        "graph": {"name": identity.name, "sha256": identity.sha256},
        **_exactness(step),
        "device": plan.device,
        "budget": {"ram_bytes": deployment.ram_bytes, "arena_bytes": deployment.arena_bytes},
        "arena_bytes_of": {
            "step": arena.bytes,
            **{each.kind: deployment.pass_bytes(each) for each in deployment.passes},
        },
        **_tiles(deployment),
        "ram": deployment.ram_map(),
        "flash": deployment.flash_map(),
        "arena": arena.to_dict(),
        "alignment": arena.alignment,
        "learning_rate": step.learning_rate,
        "updates": step.learning_rate is not None,
        **({"accumulate": step.accumulate} if step.accumulate > 1 else {}),
        "commit": deployment.commit,
        **({"commits_to": "flash"} if deployment.saves else {}),
        **({"commit_every": deployment.commit_every} if deployment.commit_every > 1 else {}),
        "memory_mapped": plan.memory_mapped,
        "mode": str(plan.mode),
        "status": None if result is None else str(result.status),
        **_cycles(deployment),
        "inputs": [{**_value(value), **_tables(step, value)} for value in step.inputs],
        "outputs": [_value(value) for value in _outputs(step)],
        "states": [
            {**_value(value), "home": _home(value, source), "pieces": len(value.pieces)}
            for value in step.states
        ],
        "gradients": [_value(value) for value in step.gradients],
        **_evaluation(deployment),
        **_replay(deployment),
        **_generation(deployment, source),
        "slots": list(deployment.slots),
        "nodes": [
            {"name": node.name, "op": node.op, "kernels": [call.kernel for call in calls]}
            for node, calls in zip(step.graph.nodes, step.calls, strict=True)
        ],
        "program": [[str(op), index] for op, index in plan.program],
        "tensors": [tensor.name for tensor in step.graph.tensors],
        "versions": {"poetmodel": __version__, **step.versions},
        "command": command,
        "files": list(names),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def summary(deployment: Deployment) -> dict[str, Any]:
    """Return what was decided, for programs: RAM by use, homes, and the schedule's figures."""
    result = deployment.result
    return {
        "graph": deployment.step.graph.name,
        **_exactness(deployment.step),
        "device": deployment.plan.device,
        "ram_bytes": deployment.ram_bytes,
        **_tiles(deployment),
        "ram": deployment.ram_map(),
        "flash": deployment.flash_map(),
        "arena_bytes": deployment.arena_bytes,
        "arena_lower_bound_bytes": deployment.arena.lower_bound_bytes,
        "slots": len(deployment.slots),
        "stored_bytes": deployment.stored_bytes,
        "written_bytes": deployment.written_bytes,
        "steps_until_worn": deployment.steps_until_worn,
        **_cycles(deployment),
        "schedule": None if result is None else result.to_dict(),
    }


def _tiles(deployment: Deployment) -> dict[str, Any]:
    """Return the size of tiles, and the sizes that were tried, if there was a choice."""
    tried = [trial.to_dict() for trial in deployment.tile_trials]
    return {"tile_bytes": deployment.tile_bytes, **({"tile_trials": tried} if tried else {})}


def _cycles(deployment: Deployment) -> dict[str, Any]:
    """Return how instructions became times and energies, if they did."""
    result = deployment.result
    model = None if result is None else result.problem.costs.cycles
    return {} if model is None else {"cycles": model.to_dict()}


def _evaluation(deployment: Deployment) -> dict[str, Any]:
    """Return what ``pm_evaluate`` gives, and whether the best generation is kept."""
    if deployment.evaluation is None:
        return {}
    gives = ["loss", *["correct"] * deployment.counts_correct]
    return {"evaluation": {"gives": gives, "keeps_best": deployment.keeps_best}}


def _generation_document(
    deployment: Deployment, *, layout_id: str, instance_id: str
) -> dict[str, Any]:
    """Return the key ``generation`` of a manifest: how a deployment writes one."""
    tensors, buffers = list(deployment.generation), deployment.step.buffers
    states: dict[str, Any] = {}
    for value in deployment.step.states:
        pieces = list(state_pieces(deployment.step, value))
        if all(name in tensors for name, _, _ in pieces):
            states[value.name] = {
                "shape": list(value.shape),
                "dtype": str(value.type),
                "pieces": [[tensors.index(name), offset, n] for name, offset, n in pieces],
            }
    return {
        "step_id": deployment.identity[:8],
        "layout_id": layout_id,
        "instance_id": instance_id,
        "commit_unit": deployment.layout.write_unit_bytes,
        "commit_block": deployment.layout.erase_block_bytes,
        "checksums": deployment.checksum,
        "shared": deployment.generations_in_block,
        "page_slots": len(deployment.page_bytes),
        "stored_bytes": deployment.stored_bytes,
        "in_flash": deployment.saves,
        "tensor_bytes": [buffers[name].bytes for name in tensors],
        "states": states,
    }


def _replay(deployment: Deployment) -> dict[str, Any]:
    """Return what stored samples hold, and what a step takes on a batch and on a stored sample."""
    replay, step = deployment.replay, deployment.step
    if replay is None:
        return {}
    plan, front = deployment.plan, replay.front
    reserved = reserved_bytes(step, deployment.stack_bytes, replay)
    beside = input_bytes(step) - replay.input_bytes
    stored = stored_arena_bytes(replay, step, plan, deployment.arena)
    return {
        "replay": {
            "samples": replay.samples,
            "sample_bytes": replay.sample_bytes,
            "holds": list(rows_of(step, front)),
            "sample_id": front_identity(step, front)[:8],
            "stored_bytes": replay.stored_bytes,
            "group_samples": replay.group_samples,
            "group_bytes": replay.group_bytes,
            "step": {
                "ram_bytes": deployment.arena_bytes + reserved,
                "instructions": instructions_of(step, plan),
                "nodes": len(step.graph.nodes),
            },
            "stored_step": {
                "ram_bytes": stored + reserved - beside,
                "instructions": instructions_of(step, plan, front.nodes),
                "nodes": len(step.graph.nodes) - len(front.nodes),
            },
        }
    }


def _generation(deployment: Deployment, source: StepSource) -> dict[str, Any]:
    """Return how generations lie on storage, and what the step takes over of another one's."""
    if not deployment.generation:
        return {}
    ids = {"layout_id": source.layout_id, "instance_id": source.instance_id}
    found: dict[str, Any] = {"generation": _generation_document(deployment, **ids)}
    migration = deployment.migration
    if migration is not None:
        found["migrates"] = {
            "step_id": migration.source["step_id"],
            "taken": list(migration.taken),
            "anew": list(migration.anew),
            "left": list(migration.left),
        }
    return found


def _exactness(step: LoweredStep) -> dict[str, str]:
    """Return what is said of the numbers of a step that is not float throughout."""
    return {"exactness": step.graph.exactness} if step.graph.exactness else {}


def _outputs(step: LoweredStep) -> Iterator[NamedTensor]:
    """Yield what an inference writes for its caller."""
    if step.inference is not None and step.inference.output is not None:
        yield step.inference.output


def _value(value: NamedTensor) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": list(value.shape),
        "dtype": "float32" if value.type is DataType.REAL else str(value.type),
        "bytes": value.elements * value.type.itemsize,
    }


def _tables(step: LoweredStep, value: NamedTensor) -> dict[str, Any]:
    """Return the tables that convert an input of bytes: a row for all channels, or one for each."""
    if value.type is DataType.REAL:
        return {}
    names = tables_of(step, value)
    rows = [step.values[name].reshape(-1, BYTES).astype(float).tolist() for name in names]
    return {"tables": [[_numbers(row) for row in table] for table in rows]} if rows else {}


def _numbers(row: Sequence[float]) -> list[float | str]:
    """Return numbers as JSON has them; those that are not finite by their names."""
    return [number if math.isfinite(number) else str(number) for number in row]


def _home(value: NamedTensor, source: StepSource) -> str:
    """Return the home of a state tensor; of one in tiles that have several, both."""
    return "+".join(sorted({source.home(ref.buffer) for ref in value.pieces}))
