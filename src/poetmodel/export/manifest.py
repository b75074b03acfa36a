"""``manifest.json`` and ``README.md``: what a folder holds, for programs and for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from poetmodel import __version__
from poetmodel.export.emitter import elements
from poetmodel.export.step import DataType
from poetmodel.schedule import GraphIdentity
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.source import StepSource
    from poetmodel.export.step import Step, Value

_DTYPES: Final = {DataType.REAL: "float32", DataType.INT32: "int32", DataType.UINT8: "uint8"}


def manifest(deployment: Deployment, source: StepSource, *, command: str) -> str:
    """Return the text of ``manifest.json``; sizes are those of the build for float."""
    step, arena, plan = deployment.step, deployment.arena, deployment.plan
    identity = GraphIdentity.of(step.graph)
    result = deployment.result
    document: dict[str, Any] = {
        "format": "poetmodel-export",
        "version": 1,
        "graph": {"name": identity.name, "sha256": identity.sha256},
        "device": plan.device,
        "budget": {"ram_bytes": deployment.ram_bytes, "arena_bytes": deployment.arena_bytes},
        "ram": deployment.ram_map(),
        "arena": arena.to_dict(),
        "alignment": arena.alignment,
        "learning_rate": step.learning_rate,
        "updates": step.learning_rate is not None,
        "commit": deployment.commit,
        "memory_mapped": plan.memory_mapped,
        "mode": str(plan.mode),
        "status": None if result is None else str(result.status),
        "inputs": [_value(value) for value in step.inputs],
        "outputs": [_value(value) for value in _outputs(step)],
        "states": [
            {**_value(value), "home": _home(value, source), "pieces": len(value.pieces)}
            for value in step.states
        ],
        "gradients": [_value(value) for value in step.gradients],
        "slots": list(deployment.slots),
        "nodes": [
            {"name": node.name, "op": node.op, "kernels": [call.kernel for call in calls]}
            for node, calls in zip(step.graph.nodes, step.calls, strict=True)
        ],
        "program": [[str(op), index] for op, index in plan.program],
        "tensors": [tensor.name for tensor in step.graph.tensors],
        "versions": {"poetmodel": __version__, **step.versions},
        "command": command,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def summary(deployment: Deployment) -> dict[str, Any]:
    """Return what was decided, for programs: RAM by use, homes, and the schedule's figures."""
    result = deployment.result
    return {
        "graph": deployment.step.graph.name,
        "device": deployment.plan.device,
        "ram_bytes": deployment.ram_bytes,
        "ram": deployment.ram_map(),
        "arena_bytes": deployment.arena_bytes,
        "arena_lower_bound_bytes": deployment.arena.lower_bound_bytes,
        "slots": len(deployment.slots),
        "schedule": None if result is None else result.to_dict(),
    }


def _outputs(step: Step) -> Iterator[Value]:
    """Yield what an inference writes for its caller."""
    if step.inference is not None and step.inference.output is not None:
        yield step.inference.output


def _value(value: Value) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": list(value.shape),
        "dtype": _DTYPES[value.type],
        "bytes": elements(value) * value.type.itemsize,
    }


def _home(value: Value, source: StepSource) -> str:
    """Return the home of a state tensor; of one in tiles that have several, both."""
    return "+".join(sorted({source.home(ref.buffer) for ref in value.pieces}))


def readme(deployment: Deployment, *, command: str) -> str:
    """Return the text of ``README.md``."""
    step, plan = deployment.step, deployment.plan
    rows = [f"| {what} | {size:,} |" for what, size in deployment.ram_map().items()]
    inputs = ", ".join(f"`{value.name}` {list(value.shape)}" for value in step.inputs)
    trains = step.learning_rate is not None
    what = "updates all trained parameters" if trains else "hands out the gradients"
    return _README.format(
        name=step.graph.name,
        device=plan.device or "no device",
        ram=format_bytes(deployment.ram_bytes),
        what=what,
        rows="\n".join(rows),
        inputs=inputs,
        rate=step.learning_rate if trains else 0,
        command=command,
        mapped=_MAPPED if plan.memory_mapped else "",
        infer=_infer_text(step.inference),
        slots=len(deployment.slots),
    )


def _infer_text(inference: Step | None) -> str:
    if inference is None or inference.output is None:
        return ""
    shape = list(inference.output.shape)
    return _INFER.format(inputs=len(inference.inputs), shape=shape)


_MAPPED: Final = """
   The core reads this storage like RAM: write `pm_storage_address` too, or `pm_page_address` and
   `pm_page_write`."""

_INFER: Final = """\
9. Call `pm_infer(inputs, outputs)` between steps for what the model says now, in evaluation mode:
   it takes the first {inputs} of the inputs, and writes an array of {shape}.
"""

_README: Final = """\
# {name}: a training step in C

`pm_step` runs forward pass, loss and backward pass of one batch, and {what}.
It was planned for {device} and {ram} of RAM. Nothing is allocated while it runs.

| RAM | bytes |
|---|---|
{rows}

The folder was made by

```sh
{command}
```

## Try it

```sh
make host                                     # build/host/pm_run
build/host/pm_run STEPS LEARNING_RATE INPUTS STATE
make run-m4 ARGS="STEPS LEARNING_RATE INPUTS STATE"   # on an emulated Cortex-M4
```

INPUTS is a file of raw batches, one after the other: {inputs}.
STATE is written: all state tensors, in the order of `manifest.json`. `make host-double` computes in
double, under sanitizers. The learning rate when this was exported: {rate}.

## Port it to your board

1. Compile `pm_step.c`, `pm_state.c`, `pm_weights.c` and `kernels/*.c` with `-ffp-contract=off`.
2. Give the linker script of your board the stack of the table above.
3. Storage: compile `pm_pages.c` too, and write the two functions of `pm_storage.h` for yours;
   `driver_spi_flash.c` has them for serial flash. Or, with DMA, write the three of `pm_driver.h`
   instead, for {slots} slots whose sizes `pm_slot_bytes` has.{mapped}
4. Call `pm_init()` once.
5. Put a batch into arrays of your own, in the order of `manifest.json`.
6. Call `pm_step(inputs, learning_rate, &loss)` for each batch, with the rate of the optimizer's
   first group of trained parameters; the others keep their proportion to it.
7. An error number other than `PM_TORN` leaves state as it was: call again.
8. Read the new weights with `pm_read_state`.
{infer}"""
