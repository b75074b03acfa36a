"""All that is known of a compiled step: as plain values, in a file, as a page."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.data import write_text
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError
from poetmodel.graph.io import graph_to_dict
from poetmodel.torch.profiling import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch.certificate import Certificate
    from poetmodel.torch.preparation import Compiled, Options

FORMAT: Final = "poetmodel-step"
VERSION: Final = 1

SUFFIXES: Final = (".html", ".json")
"""Files that a report can be written to: a page, or its figures."""


def report(compiled: Compiled, certificate: Certificate | None, *, call: str) -> dict[str, Any]:
    """Return what is known about a compiled step as plain values.

    Parameters
    ----------
    compiled : Compiled
        The step.
    certificate : Certificate, optional
        What was found when it was last verified.
    call : str
        What makes the step, as Python.
    """
    import torch

    graph, coarse, check = compiled.trace.graph, compiled.coarse, compiled.check
    program = compiled.plan.program
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "torch": str(torch.__version__),
        "call": call,
        "graph": {
            "nodes": len(graph.nodes),
            "tensors": len(graph.tensors),
            "scheduled_tensors": len(coarse.numbers),
            "threshold_bytes": coarse.threshold_bytes,
            "batch_size": graph.batch_size,
            "resident_bytes": dict(graph.resident_bytes),
        },
        "costs": [*compiled.notes, f"minimized: {compiled.result.problem.minimize}"],
        "budget_bytes": compiled.budget_bytes,
        "keep_all_bytes": compiled.keep_all_bytes,
        "reserved_bytes": coarse.reserved_bytes,
        "plan": {
            "mode": str(compiled.plan.mode),
            "device": compiled.device,
            "instructions": len(program),
            "recomputed": sum(op == "compute" for op, _ in program) - len(graph.nodes),
            "peak_bytes": compiled.peak_bytes,
            "written_bytes": check.written_bytes,
            "read_bytes": check.read_bytes,
            "compute_s": check.compute_s,
            "transfer_s": check.transfer_s,
            "stall_s": check.stall_s,
            "makespan_s": check.makespan_s,
            "energy_j": check.energy_j,
        },
        "compile_s": compiled.compile_s,
        "certificate": None if certificate is None else certificate.to_dict(),
        "result": compiled.result.to_dict(),
        "scheduled": {
            "graph": graph_to_dict(coarse.graph),
            "costs": {
                name: value if isinstance(value, bool) else list(value)
                for name, value in asdict(compiled.costs.table(coarse.graph)).items()
            },
        },
    }


def write(path: str | Path, found: dict[str, Any]) -> None:
    """Write what `report` returned, as a page or as JSON by the name of the file.

    Raises
    ------
    InputError
        If the file cannot be written; nothing is then changed.
    MissingExtraError
        If a library that draws the page is not installed.
    """
    kind = Path(str(path)).suffix
    if kind not in SUFFIXES:
        msg = f"{path}: expected a file *.html, the page, or *.json, its figures"
        raise InputError(msg)
    if kind == ".json":
        write_text(path, json.dumps(found, allow_nan=False, ensure_ascii=False) + "\n")
        return
    from poetmodel.report.page import check_report, write_report
    from poetmodel.report.step_file import step_subject

    check_report(path)
    write_report(path, [step_subject(found, source="compiled step")])


def as_call(function: Callable[..., object], options: Options) -> str:
    """Return a call of `poetmodel.torch.compile` with these options, those by default left out."""
    parameters = signature(function).parameters
    words = ["model", "loss_fn", "inputs"]
    for field in fields(options):
        value = getattr(options, field.name)
        if value != parameters[field.name].default:
            words.append(f"{field.name}={_as_python(field.name, value)}")
    return f"poetmodel.torch.compile({', '.join(words)})"


def _as_python(name: str, value: object) -> str:
    if isinstance(value, Device):
        return repr(value.key or value.name)
    if isinstance(value, Path):
        return repr(str(value))
    return name if isinstance(value, Profile | Costs) else repr(value)
