"""The text of ``manifest.json``, and the summary of a deployment."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from poetmodel.export.manifest import (
    FORMAT,
    VERSION,
    Generation,
    GenerationState,
    describe_samples,
)
from poetmodel.export.replay import (
    list_cuts,
    program_instructions,
    replay_arena_bytes,
    sample_tensor_names,
)
from poetmodel.export.reserves import input_bytes, reserved_bytes
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.ranges import number_check_instructions
from poetmodel.lowered.tables import BYTE_VALUES, find_tables
from poetmodel.schedule import GraphIdentity
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep


def make_manifest(deployment: Deployment, names: Sequence[str]) -> str:
    """Return the text of ``manifest.json``, with files `names` and sizes in single precision."""
    step, arena, plan = deployment.step, deployment.arena, deployment.plan
    identity = GraphIdentity.from_graph(step.graph)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
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
            for node, calls in step.operations
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


def _describe_generation(deployment: Deployment) -> Generation:
    """Return the layout of the generations, as a later export reads it from the manifest."""
    tensors, buffers = list(deployment.generation_names), deployment.step.buffers
    states = {}
    for tensor in deployment.step.states:
        pieces = list(deployment.step.list_pieces(tensor))
        if all(name in tensors for name, _, _ in pieces):
            states[tensor.name] = GenerationState(
                shape=list(tensor.shape),
                dtype=str(tensor.type),
                pieces=[[tensors.index(name), offset, count] for name, offset, count in pieces],
            )
    return Generation(
        step_id=deployment.step_id,
        layout_id=deployment.layout_id,
        instance_id=deployment.instance_id,
        commit_unit=deployment.layout.write_unit_bytes,
        commit_block=deployment.layout.erase_block_bytes,
        checksums=deployment.options.checksum,
        generations=deployment.generations,
        best=deployment.stores_best,
        samples=describe_samples(deployment.step, deployment.replay),
        page_bytes=list(deployment.page_bytes),
        stored_bytes=deployment.stored_bytes,
        in_flash=deployment.copies_to_flash,
        tensor_bytes=[buffers[name].bytes for name in tensors],
        states=states,
    )


def _replay_keys(deployment: Deployment) -> dict[str, Any]:
    """Return the key ``replay``, if any: samples, cuts, and steps without and on stored samples."""
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
            "cuts": [cut._asdict() for cut in list_cuts(replay, step, plan)],
            "holds": list(sample_tensor_names(step, front)),
            "sample_id": deployment.sample_id,
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
    keys: dict[str, Any] = {"generation": _describe_generation(deployment).model_dump()}
    migration = deployment.migration
    if migration is not None:
        keys["migrates"] = {
            "step_id": migration.source.step_id,
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
    tables = [step.values[name].reshape(-1, BYTE_VALUES).astype(float).tolist() for name in names]
    encoded_tables = [[_encode_numbers(row) for row in table] for table in tables]
    return {"tables": encoded_tables} if encoded_tables else {}


def _encode_numbers(numbers: Sequence[float]) -> list[float | str]:
    """Return numbers for JSON, with strings in place of numbers that are not finite."""
    return [number if math.isfinite(number) else str(number) for number in numbers]


def _format_home(tensor: NamedTensor, deployment: Deployment) -> str:
    """Return the home of a state tensor; the homes joined by + if those of its tiles differ."""
    return "+".join(sorted({deployment.home_of(ref.buffer) for ref in tensor.pieces}))
