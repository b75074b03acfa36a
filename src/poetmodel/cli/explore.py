"""``poetmodel explore``: a local page on which one drags the budget."""

from __future__ import annotations

import socket
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.cli import options
from poetmodel.cli.inputs import in_sizes, is_step_file, read_costs
from poetmodel.cli.output import print_note, print_text, set_quiet
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.files import installed_version
from poetmodel.graph.catalogue import Variant

if TYPE_CHECKING:
    from poetmodel.explore.choice import Catalogue, ExplorerChoice

PORT: Final = 8642
"""The port unless one is given; a busy one is passed over for the next free one."""
PORTS: Final = 20
"""How many ports are tried."""
STORE: Final = "poetmodel-explore.sqlite"
"""Default store, in the working folder."""
LOOPBACK: Final = "127.0.0.1"


@options.group
class ServerOptions:
    """The server."""

    port: int | None = options.output(
        None,
        "--port N",
        f"Port of the page on this machine; 0 takes any free one. Default: {PORT}, or the next.",
        parser=options.whole_number(65535, least=0),
    )
    store: Path = options.output(
        Path(STORE), "--store FILE", "SQLite file of all answers; several servers may share it."
    )
    no_browser: bool = options.output(
        False, "--no-browser", "Only print the address, open no browser."
    )
    quiet: bool = options.output(False, "--quiet", "Print nothing but errors.", callback=set_quiet)
    workers: int | None = options.how(
        None,
        "--workers N",
        "Processes that solve. Default: as many as there are cores.",
        parser=options.whole_number(256),
    )


@options.command("poetmodel explore mobilenetv2 --device rpi4b --ram 40%")
def explore(
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: Annotated[options.LimitOptions, options.without("constraints", "energy_budget")],
    search: Annotated[options.SearchOptions, options.without("method", "formulation")],
    serving: ServerOptions,
) -> None:
    """Open a local page: drag the RAM budget and see the schedule change."""
    missing = [
        name for name in ("fastapi", "uvicorn", "jinja2", "plotly") if not installed_version(name)
    ]
    if missing:
        raise MissingExtraError(
            f"explore: needs {', '.join(missing)}, not installed here; "
            "pip install 'poetmodel[explore]' installs what it needs"
        )
    catalogue, choice, initial = starting(source, costing, limits)
    from poetmodel.explore.running import serve

    listening = _listen(serving.port)

    def ready(address: str) -> None:
        print_text(f"The explorer: {address}", "Ctrl-C ends it; answers stay in the store.")
        sys.stdout.flush()  # whoever reads a pipe waits for it
        if not serving.no_browser:
            webbrowser.open(address)

    print_note(f"starting; answers are kept in {serving.store}")
    serve(
        listening,
        store=serving.store,
        catalogue=catalogue,
        initial={**choice.model_dump(), **initial},
        search={
            "backend": search.backend,
            "time_limit": search.time_limit,
            "gap": search.gap,
            "threads": search.threads,
            "solver_options": search.solver_options,
        },
        workers=serving.workers,
        ready=ready,
    )


def starting(
    source: options.GraphOptions, costing: options.CostOptions, limits: options.LimitOptions
) -> tuple[Catalogue, ExplorerChoice, dict[str, Any]]:
    """Return the choices, the first one of each, and the positions of the sliders."""
    from poetmodel.explore.choice import ExplorerChoice, of_files

    source, limits = in_sizes(source, costing, limits)
    if source.model is not None and source.graph is not None:
        raise InputError(
            f"MODEL {source.model!r} and --graph {source.graph!r} exclude each other: give only one"
        )
    named, known = source.graph or source.model or "mobilenetv2", _is_built_in(source)
    is_step = not known and is_step_file(named)
    catalogue = of_files(
        graph=None if known or is_step else named,
        step=named if is_step else None,
        device=costing.device,
        profile=costing.profile,
    )
    device = costing.device or "rpi4b"
    counts = limits.deadline_counts
    choice = ExplorerChoice.model_validate(
        {
            "model": named if known else Path(named).name,
            "device": next(iter((*catalogue.profiles, *catalogue.devices)), device),
            **{name: getattr(source.shape, name) for name in Variant.__dataclass_fields__},
            "paging": not limits.no_paging,
            "recompute": not limits.no_recompute,
            "minimize": str(limits.minimize or "energy"),
            "deadline_counts": None if counts is None else str(counts),
            "count_parameters": limits.count_parameters,
            "commit": limits.steps_to_commit,
        }
    )
    graph = catalogue.source(choice).graph
    costs = read_costs(graph, costing) if costing.any else catalogue.costs(graph, choice)
    problem = limits.problem(graph, costs)  # every fault of the options is told before all else
    choice = choice.model_copy(
        update={"aux_bytes": problem.aux_limit_bytes if limits.aux else None}
    )
    initial = {
        "ram_bytes": None if limits.ram is None else problem.ram_budget_bytes,
        "deadline_s": problem.deadline_s,
    }
    return catalogue, choice, initial


def _is_built_in(source: options.GraphOptions) -> bool:
    from poetmodel.graph.catalogue import check_model_name, model_names

    if source.graph is not None:
        return False
    if source.model is None or source.model in model_names():
        return True
    if Path(source.model).exists() or source.model.endswith(".json"):
        return False
    check_model_name(source.model)
    return True


def _listen(port: int | None) -> socket.socket:
    """Return a socket of this machine alone, on the port or the first that is free."""
    ports = range(PORT, PORT + PORTS) if port is None else (port,)
    for number in ports:
        # asyncio lets replies go out at once where a socket says that it is one of TCP.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, number))
        except OSError:
            listener.close()
        else:
            return listener
    if port is None:
        raise InputError(f"no port from {PORT} to {PORT + PORTS - 1} is free; give --port N")
    raise InputError(f"--port {port}: in use or not permitted; choose another")
