"""Inputs of commands: graphs, devices, costs; early checks that outputs can be written."""

from __future__ import annotations

from dataclasses import replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.case.case import Case
from poetmodel.cli.failures import print_warnings
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import load_file

if TYPE_CHECKING:
    from poetmodel.case.opening import Checked
    from poetmodel.cli.options import CostOptions, GraphOptions
    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep

MIN_PYTORCH_BYTES: Final = 2**26
"""RAM below which a device cannot run PyTorch [B]."""


# -- graphs ------------------------------------------------------------------------------------


def read_given_step(graph_options: GraphOptions, case: Case | None = None) -> LoweredStep | None:
    """Return the step of a MODEL argument or ``--graph`` option that is a step file, else None."""
    if (graph_options.model is None) == (graph_options.graph is None):
        return None
    return (case or graph_options.case()).load_step()


def extra_ram_bytes(step: LoweredStep, *, commit: bool = False) -> int:
    """Return the RAM of exported C besides tensors and ``pm_infer``: inputs, stack, runtime [B]."""
    from poetmodel.export.reserves import parse_stack, reserved_bytes

    return reserved_bytes(replace(step, inference=None), parse_stack(None, commit=commit))


def read_graph(graph_options: GraphOptions) -> Graph:
    """Return the graph of MODEL (network, file) or ``--graph`` (file); raise for both or none."""
    if graph_options.model is not None and graph_options.graph is not None:
        raise InputError(
            f"MODEL {graph_options.model!r} and --graph {graph_options.graph!r} exclude each "
            "other: give only one"
        )
    case = graph_options.case()
    if case.source is None:
        raise InputError(
            "missing graph: give a MODEL such as resnet18-cifar ('poetmodel models' lists them) or "
            "--graph FILE"
        )
    if graph_options.graph is not None and not case.is_step_file:
        return load_file(case.source, case.shape)
    return case.load_graph()


# -- devices and costs -------------------------------------------------------------------------


def read_device(device: str | None) -> Device | None:
    """Return the device of ``--device``, a built-in device or a file; None without the option."""
    if device is None:
        return None
    from poetmodel.device import Device

    return Device.load(device)


def device_warnings(device: Device) -> tuple[str, ...]:
    """Return warnings about implausible values of a device."""
    from poetmodel.device.sanity import sanity_warnings

    return tuple(f"device {device.short_name}: {text}" for text in sanity_warnings(device))


def warn_about_kernels(graph: Graph, device: Device | None) -> None:
    """Print a warning if a graph has PyTorch's kernels, for which the device has too little RAM."""
    if device is None or graph.kernels != "pytorch" or device.ram_bytes >= MIN_PYTORCH_BYTES:
        return
    print_warnings(
        [
            f"{graph.name} is a graph of PyTorch's kernels, and {device.short_name} runs "
            "those of exported C, whose RAM differs: use the step file that 'poetmodel export "
            "--target step' writes"
        ]
    )


def read_costs(graph: Graph, cost_options: CostOptions) -> Costs:
    """Return the measured costs of ``--profile``, else the estimates for ``--device``.

    Prints the warning of `warn_about_kernels` about ``--device``.
    """
    costs = Case(device=cost_options.device, profile=cost_options.profile).load_costs(graph)
    if cost_options.device is not None:
        warn_about_kernels(graph, costs.device)
    return costs


def print_notes(*opened: Checked) -> None:
    """Print the notes of schedule files, and warnings about their graphs."""
    print_warnings(dict.fromkeys(note for checked in opened for note in checked.notes))
    for checked in opened:
        warn_about_kernels(checked.graph, checked.problem.costs.device)


# -- files to write ----------------------------------------------------------------------------


def check_outputs(*outputs: tuple[str, Path | None], inputs: tuple[str | None, ...] = ()) -> None:
    """Raise `InputError` unless output files can be written and differ from inputs and each other.

    `inputs` are paths or other names; only existing files are compared. A file of ``--plot`` must
    have the suffix of a picture whose libraries are installed.
    """
    from poetmodel.files import check_writable

    option_by_path: dict[str, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        if option == "--plot":
            from poetmodel.report.drawing import check_picture

            check_picture(path)
        real_path = realpath(path)
        if real_path in option_by_path:
            raise InputError(
                f"{option} {path}: {option_by_path[real_path]} already names this file; give "
                "another name"
            )
        for input_path in inputs:
            if (
                input_path is not None
                and path.exists()
                and Path(input_path).exists()
                and path.samefile(input_path)
            ):
                raise InputError(f"{option} {path}: this is an input file; give another name")
        check_writable(path)
        option_by_path[real_path] = option
