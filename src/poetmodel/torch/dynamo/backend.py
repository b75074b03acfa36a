"""`backend`: a RAM budget for ``torch.compile``; `partitioner`: the same for Inductor alone."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import Device
from poetmodel.errors import InputError, shown
from poetmodel.files import unknown_key
from poetmodel.solver.request import Request
from poetmodel.torch.cache import Cache
from poetmodel.torch.dynamo.compiling import BY_NAME, Backend
from poetmodel.torch.dynamo.gradients import OPTION
from poetmodel.torch.dynamo.planning import (
    MEASURED,
    BackendOptions,
    PlanRecord,
    check_budget,
)
from poetmodel.torch.dynamo.regions import region_faults
from poetmodel.torch.dynamo.rewriting import AUTO, NO_GRAPH
from poetmodel.torch.runtime.profiling import measure_paging
from poetmodel.torch.state.pages import make_folder
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.dynamo.inductor import Partitioner

EAGER, INDUCTOR = "eager", "inductor"
"""Whose kernels a graph can run."""
_PLACES: Final = ("cpu", "cuda", "meta", "mps", "xpu")
"""Devices of PyTorch, which a device here may be mistaken for."""
_NAMED: Final[list[tuple[dict[str, Any], Backend]]] = []
"""Back ends that were asked for by name, with their options."""


def backend(  # noqa: PLR0913 - its options
    ram: str | int,
    *,
    kernels: str = EAGER,
    storage: str | Path | None = None,
    device: str | Device | None = None,
    costs: str | None = None,
    time_limit: float = 20.0,
    gap: float = 0.01,
    outside: str | int | None = None,
    regions: Mapping[str, str | int] | None = None,
    loss_only: bool = False,
    add_gradients: bool = False,
    on_progress: Callable[[SolveProgress], bool | None] | None = None,
    cache: str | Path | bool = True,
) -> Backend:
    """Return a back end for ``torch.compile`` that keeps a RAM budget.

    Parameters
    ----------
    ram : str or int
        What the compiled function may allocate at once: activations, gradients that it hands over,
        results, workspaces; calls that wait for their backward pass count together. Bytes,
        ``8GiB``, or a percentage of the peak of the same function with everything kept: that of its
        first shape, and so many bytes for all that come after; without gradients nothing is kept,
        and a percentage stands for all of the peak. ``eager``: no more than the model takes by
        itself, with checkpoints of its own if it has any. Parameters, inputs and the optimizer's
        state are not part of it.
    kernels : str
        ``eager``: those that PyTorch runs without ``torch.compile``, which give the same bits.
        ``inductor``: the fused ones of ``torch.compile``, with its bits; needs a C++ compiler, does
        not page, and plans no evaluation without gradients.
    storage : str or Path, optional
        A folder for pages; without it nothing is paged.
    device : str or Device, optional
        Whose figures estimate times; by default this machine's, measured once.
    costs : str, optional
        ``measured``: time the operations of the graph in place of estimates.
    time_limit : float
        Longest time to solve the graphs of a call [s].
    gap : float
        Gap between schedule and bound at which a solve ends, as a fraction.
    outside : str or int, optional
        What lives between the function's forward and its backward pass beside its results, such as
        a loss that is computed outside of it: bytes, ``3MiB``, or ``auto``, which measures it in
        the first step, that may go over the budget, and plans again. Only with eager kernels.
    regions : mapping, optional
        Budgets of modules by their names or patterns, ``{"encoder.*": "30%"}``: the bytes that they
        make which are in RAM when the backward pass begins, or a share of those when everything is
        kept. `region` does it inside of the model. Only with eager kernels.
    loss_only : bool
        Whether the backward pass begins with numbers alone: where one of the results is a loss,
        others, such as logits, are returned without a way back. PyTorch would make gradients of
        zeros for them. A gradient that reaches one of them is an error.
    add_gradients : bool
        Whether the backward pass adds each gradient of a parameter to ``.grad`` as soon as it is
        computed, and frees it, in place of returning all at its end. ``.grad`` is not part of the
        budget then. Hooks of ``register_post_accumulate_grad_hook`` run after the backward pass of
        the function. Other hooks of parameters, gradients that are not for ``.grad``, parameters
        that get gradients from elsewhere in the same backward pass, DDP and FSDP2 are refused by
        name. Only with eager kernels.
    on_progress : callable, optional
        Called with the progress of a solve; it ends where that returns False.
    cache : str, Path or bool
        Folder of what was measured and solved before; True for the user's, False for none.

    Returns
    -------
    Backend
        For ``torch.compile(function, backend=..., fullgraph=True, dynamic=False)``, or
        ``model.compile`` likewise. Its ``plans`` tell of each graph.

    Raises
    ------
    InputError
        If an argument is none of these.
    """
    given = locals().copy()
    faults = [*_faults(**given)]
    if faults:
        raise InputError(faults)
    if storage is not None:
        make_folder(storage)
    wanted = BackendOptions(
        ram=ram,
        device=Device.load(device) if isinstance(device, str) else device,
        costs=costs,
        paging=None if storage is None else measure_paging(storage),
        time_limit=time_limit,
        gap=gap,
        outside=outside,
        regions=regions,
        loss_only=loss_only,
        add_gradients=add_gradients,
        on_progress=on_progress,
        cache=Cache.of(cache),
    )
    if kernels == INDUCTOR:
        from poetmodel.torch.dynamo.inductor import InductorBackend

        return InductorBackend(wanted)
    return Backend(wanted, storage)


def _faults(kernels: str, costs: str | None, **given: Any) -> Iterator[str]:
    """Yield why a back end cannot be made with some options."""
    yield from _wrong_numbers(**given)
    yield from region_faults(given["regions"])
    if kernels not in (EAGER, INDUCTOR):
        yield f"kernels: expected {EAGER} or {INDUCTOR}, got {shown(kernels)}"
    if costs not in (None, MEASURED):
        yield f"costs: expected {MEASURED} or nothing, got {shown(costs)}"
    if kernels == INDUCTOR and given["storage"] is not None:
        yield f"storage: pages need kernels={EAGER!r}"
    if kernels == INDUCTOR:
        wanted = (name for name in ("outside", "regions", OPTION) if given[name])
        yield from (f"{name}: needs kernels={EAGER!r}" for name in wanted)
    if kernels == INDUCTOR and costs == MEASURED:
        yield f"costs: kernels that are not written yet cannot be {MEASURED}"
    if costs is not None and given["device"] is not None:
        yield "give a device or costs, not both"
    kinds: dict[str, tuple[str, Any]] = {
        "device": ("a device or its name", str | Device | None),
        "storage": ("a folder", str | Path | None),
        "cache": ("a folder, True or False", str | Path | bool),
        "on_progress": ("a function", Callable | None),
        "loss_only": ("True or False", bool),
        OPTION: ("True or False", bool),
    }
    for name, (expected, kind) in kinds.items():
        if not isinstance(given[name], kind) or given[name] == "":
            yield f"{name}: expected {expected}, got {shown(given[name])}"
    if str(given["device"]).partition(":")[0] in _PLACES:
        yield (
            f"device: {shown(given['device'])} is a place where PyTorch computes; a device is a "
            "board or a card whose figures estimate times, such as rpi4b, a100 or a file *.toml; "
            "leave it out for those of this machine"
        )


def _wrong_numbers(
    ram: object, time_limit: float, gap: float, outside: Any, **_: Any
) -> Iterator[str]:
    """Yield what is wrong with sizes and the limits of a solve."""
    checks: list[Callable[[], object]] = [
        lambda: check_budget(ram),
        lambda: Request(time_limit_s=time_limit, gap=gap),
    ]
    if outside not in (None, AUTO):
        checks.append(lambda: parse_size(outside, field="outside (auto or a size)"))
    for check in checks:
        try:
            check()
        except InputError as error:
            yield from error.faults


def named(module: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
    """Compile a graph as ``torch.compile(..., backend="poetmodel", options={"ram": "60%"})`` asks.

    Options are the parameters of `backend`; equal ones are one back end, with one budget.
    """
    options = given.pop("options", {})
    known = signature(backend).parameters
    faults = [f"options: {key}: {unknown_key(key, known)}" for key in options if key not in known]
    faults += [f"{key}: the back end has options alone" for key in given]
    if "ram" not in options:
        faults.append('options: expected a budget, such as options={"ram": "60%"}')
    if faults:
        raise InputError(faults)
    back = next((back for known, back in _NAMED if known == options), None)
    if back is None:
        back = backend(**options)
        _NAMED.append((dict(options), back))
    return back(module, inputs)


BY_NAME.append(named)


def plans() -> list[PlanRecord]:
    """Return one record for each graph of back ends that were asked for by name.

    Returns
    -------
    list of PlanRecord
        As ``plans`` of a `Backend` has them: those of equal options in the order of capture.
    """
    return [record for _, back in _NAMED for record in back.plans]


def summary() -> str:
    """Return a line about each graph of back ends that were asked for by name."""
    return "\n".join(back.summary() for _, back in _NAMED if back.was_called) or NO_GRAPH


def partitioner(
    ram: str | int,
    *,
    device: str | Device | None = None,
    time_limit: float = 20.0,
    gap: float = 0.01,
    cache: str | Path | bool = True,
) -> Partitioner:
    """Return a partitioner for those who set Inductor up themselves.

    It plans one call: run each backward pass before the next call. A `backend` counts calls that
    wait together.

    Parameters
    ----------
    ram : str or int
        The budget, as `backend` takes it.
    device : str or Device, optional
        Whose figures estimate times; by default this machine's, measured once.
    time_limit : float
        Longest time to solve each graph [s].
    gap : float
        Gap between schedule and bound at which a solve ends, as a fraction.
    cache : str, Path or bool
        Folder of what was measured and solved before; True for the user's, False for none.

    Returns
    -------
    Partitioner
        For ``torch._inductor.config.custom_partitioner_fn``. Its ``graphs`` tell of each graph, as
        a `Backend` does.

    Raises
    ------
    InputError
        If an argument is none of these.
    """
    back = backend(
        ram, kernels=INDUCTOR, device=device, time_limit=time_limit, gap=gap, cache=cache
    )
    from poetmodel.torch.dynamo.inductor import Partitioner

    return Partitioner(back)
