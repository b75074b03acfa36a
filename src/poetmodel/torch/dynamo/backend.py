"""Functions for users: `backend`, a RAM budget for ``torch.compile``, and `partitioner`.

`named` is the back end that ``torch.compile`` calls by name; `plans` and `summary` describe its
graphs.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import Device
from poetmodel.errors import InputError, quote
from poetmodel.files import unknown_key_message
from poetmodel.solver.request import Request
from poetmodel.torch.cache import Cache
from poetmodel.torch.dynamo.compiling import BACK_END_FUNCTIONS, Backend
from poetmodel.torch.dynamo.gradients import OPTION_NAME
from poetmodel.torch.dynamo.planning import (
    EAGER_PEAK,
    MEASURED,
    BackendOptions,
    GraphRecord,
)
from poetmodel.torch.dynamo.regions import region_errors
from poetmodel.torch.dynamo.rewriting import AUTO, NO_GRAPH_TEXT
from poetmodel.torch.planning.options import type_errors
from poetmodel.torch.planning.task import check_budget
from poetmodel.torch.state.pages import make_folder
from poetmodel.torch.state.paging import measure_paging
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import fx

    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.dynamo.inductor import Partitioner

EAGER, INDUCTOR = "eager", "inductor"
"""Values of ``kernels=``."""
_NAMED_BACK_ENDS: Final[list[tuple[dict[str, Any], Backend]]] = []
"""(options, back end) of each back end that was requested by name."""


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
    """Return a back end for ``torch.compile`` that meets a RAM budget.

    Parameters
    ----------
    ram : str or int
        The maximum that the compiled function may allocate at the same time: activations, returned
        gradients, results, workspaces. Calls that wait for their backward pass count together. Pass
        bytes, ``8GiB``, or a percentage of the peak of the same function with everything kept. The
        percentage refers to the function's first shape, and its bytes apply to all later shapes;
        100 % keeps everything in each shape. For calls that wait together, the percentage refers to
        their peak in the first step. Without gradients no tensor is kept, and any percentage means
        the whole peak. ``eager``: the peak of the model itself, with its checkpoints if it has any.
        Parameters, inputs and the optimizer's state are not counted.
    kernels : str
        ``eager``: the kernels that PyTorch uses without ``torch.compile``, with the same results
        bit by bit. ``inductor``: the fused kernels of ``torch.compile``, with its results bit by
        bit; needs a C++ compiler, does not page, and plans no evaluation without gradients.
    storage : str or Path, optional
        A folder for pages, created if missing, whose transfer times are measured now; without it
        no tensor is paged.
    device : str or Device, optional
        Device that times are estimated for; by default this machine, measured once.
    costs : str, optional
        ``measured``: time the operations of the graph instead of estimating them.
    time_limit : float
        Time limit for solving all graphs of a call [s].
    gap : float
        MIP gap at which a solve ends, as a fraction.
    outside : str or int, optional
        Memory between the function's forward and backward pass besides its results, such as a loss
        that is computed outside: bytes, ``3MiB``, or ``auto``. ``auto`` measures it in the first
        step, which may exceed the budget, and plans again. Only with eager kernels.
    regions : mapping, optional
        Budgets of modules by their names or patterns, ``{"encoder.*": "30%"}``. A budget limits the
        bytes of the modules' tensors that are in RAM when the backward pass begins: in bytes, or as
        a percentage of these bytes with everything kept. `region` states budgets inside the model.
        Only with eager kernels.
    loss_only : bool
        Whether only scalars have gradients: if one of the results is a loss, other results, such as
        logits, are returned detached. Without this option PyTorch creates zero gradients for them.
        A gradient that reaches a detached result raises an error.
    add_gradients : bool
        Whether the backward pass adds each gradient of a parameter to ``.grad`` as soon as it is
        computed, and frees it, instead of returning all gradients at its end. ``.grad`` is then
        not counted in the budget. Hooks of ``register_post_accumulate_grad_hook`` run after the
        backward pass of the function, or are refused if PyTorch calls them only for returned
        gradients. Other hooks of parameters, hooks of saved tensors, ``create_graph=True``, a
        sparse ``.grad``, DDP and FSDP2 are refused. So are gradients that are not for ``.grad``,
        and parameters with gradients from elsewhere in the same backward pass. Only with eager
        kernels.
    on_progress : callable, optional
        Called with the progress of a solve; the solve ends if it returns False.
    cache : str, Path or bool
        Folder of earlier measurements and solves; True for the user's cache, False for none.

    Returns
    -------
    Backend
        For ``torch.compile(function, backend=..., fullgraph=True, dynamic=False)``, or
        ``model.compile`` likewise. Its ``plans`` has a record of each plan of a graph.

    Raises
    ------
    InputError
        If an argument is invalid, or pages cannot be written to `storage`.
    """
    arguments = locals().copy()
    errors = [*_argument_errors(**arguments)]
    if errors:
        raise InputError(errors)
    if storage is not None:
        make_folder(storage)
    settings = BackendOptions(
        ram=ram,
        device=Device.load(device) if isinstance(device, str) else device,
        costs=costs,
        paging=None if storage is None else measure_paging(storage),
        time_limit_s=time_limit,
        gap=gap,
        outside=outside,
        regions=regions,
        loss_only=loss_only,
        add_gradients=add_gradients,
        on_progress=on_progress,
        cache=Cache.from_option(cache),
    )
    if kernels == INDUCTOR:
        from poetmodel.torch.dynamo.inductor import InductorBackend

        return InductorBackend(settings)
    return Backend(settings, storage)


def _argument_errors(kernels: str, costs: str | None, **arguments: Any) -> Iterator[str]:
    """Yield an error per invalid argument or combination; devices and folders are not looked up."""
    yield from _number_errors(**arguments)
    yield from region_errors(arguments["regions"])
    if kernels not in (EAGER, INDUCTOR):
        yield f"kernels: expected {EAGER} or {INDUCTOR}, got {quote(kernels)}"
    if costs not in (None, MEASURED):
        yield f"costs: expected {MEASURED} or None, got {quote(costs)}"
    if kernels == INDUCTOR and arguments["storage"] is not None:
        yield f"storage: pages need kernels={EAGER!r}"
    if kernels == INDUCTOR:
        eager_options = (name for name in ("outside", "regions", OPTION_NAME) if arguments[name])
        yield from (f"{name}: needs kernels={EAGER!r}" for name in eager_options)
    if kernels == INDUCTOR and costs == MEASURED:
        yield f"costs: kernels that are generated later cannot be {MEASURED}"
    if costs is not None and arguments["device"] is not None:
        yield "pass a device or costs, not both"
    yield from type_errors(arguments)


def _number_errors(
    ram: object, time_limit: float, gap: float, outside: Any, **_: Any
) -> Iterator[str]:
    """Yield each error of `ram`, `time_limit`, `gap` and `outside`; ignore other arguments."""
    checks: list[Callable[[], object]] = [lambda: Request(time_limit_s=time_limit, gap=gap)]
    if ram != EAGER_PEAK:
        checks.insert(0, lambda: check_budget(ram))
    if outside not in (None, AUTO):
        checks.append(lambda: parse_size(outside, field="outside (auto or a size)"))
    for check in checks:
        try:
            check()
        except InputError as error:
            yield from error.faults


def named(module: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    """Compile a graph for ``backend="poetmodel"``; equal options share one back end and budget."""
    options = keywords.pop("options", {})
    parameters = signature(backend).parameters
    errors = [
        f"options: {key}: {unknown_key_message(key, parameters)}"
        for key in options
        if key not in parameters
    ]
    errors += [f"{key}: the back end accepts only options" for key in keywords]
    if "ram" not in options:
        errors.append('options: expected a budget, such as options={"ram": "60%"}')
    if errors:
        raise InputError(errors)
    back_end = next(
        (back_end for known_options, back_end in _NAMED_BACK_ENDS if known_options == options), None
    )
    if back_end is None:
        back_end = backend(**options)
        _NAMED_BACK_ENDS.append((dict(options), back_end))
    return back_end(module, inputs)


BACK_END_FUNCTIONS.append(named)


def plans() -> list[GraphRecord]:
    """Return one record for each plan of the back ends that were requested by name.

    Returns
    -------
    list of GraphRecord
        As in ``plans`` of a `Backend`. They are grouped by back end, in the order of first
        requests; those of one back end are in the order of planning.
    """
    return [record for _, back_end in _NAMED_BACK_ENDS for record in back_end.plans]


def summary() -> str:
    """Return the summaries of the back ends that were requested by name, one below the other.

    They are in the order of first requests. Back ends whose `Backend.was_called` is False are
    omitted; if none is left, the summary is a hint.
    """
    return (
        "\n".join(back_end.summary() for _, back_end in _NAMED_BACK_ENDS if back_end.was_called)
        or NO_GRAPH_TEXT
    )


def partitioner(
    ram: str | int,
    *,
    device: str | Device | None = None,
    time_limit: float = 20.0,
    gap: float = 0.01,
    cache: str | Path | bool = True,
) -> Partitioner:
    """Return a partitioner for users who set up Inductor themselves.

    It plans each call by itself, so each backward pass must precede the next call. A `backend`
    counts waiting calls together.

    Parameters
    ----------
    ram : str or int
        The budget, as for `backend`.
    device : str or Device, optional
        Device that times are estimated for; by default this machine, measured once.
    time_limit : float
        Time limit for solving each graph [s].
    gap : float
        MIP gap at which a solve ends, as a fraction.
    cache : str, Path or bool
        Folder of earlier measurements and solves; True for the user's cache, False for none.

    Returns
    -------
    Partitioner
        For ``torch._inductor.config.custom_partitioner_fn``. Its attribute ``graphs`` is the
        `Backend`, with ``plans`` and ``summary``.

    Raises
    ------
    InputError
        If an argument is invalid.
    """
    back_end = backend(
        ram, kernels=INDUCTOR, device=device, time_limit=time_limit, gap=gap, cache=cache
    )
    from poetmodel.torch.dynamo.inductor import Partitioner

    return Partitioner(back_end)
