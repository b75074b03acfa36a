"""``poetmodel explore``: serve a local page with sliders for RAM budget and deadline."""

from __future__ import annotations

import socket
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.case.case import Case
from poetmodel.case.spelling import UNEXPLORED_LIMITS
from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import read_costs
from poetmodel.cli.output import print_note, print_text, set_quiet
from poetmodel.errors import InputError, MissingExtraError
from poetmodel.files import installed_version
from poetmodel.problem import Limits, Problem, Quantity
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from poetmodel.explore.settings import Catalogue, ExplorerSettings

PORT: Final = 8642
"""First of the `N_PORTS` default ports; the first free one is used."""
N_PORTS: Final = 20
"""Number of ports from `PORT` on that are tried without ``--port``."""
STORE: Final = "poetmodel-explore.sqlite"
"""Default file of answers, in the working folder."""
LOOPBACK: Final = "127.0.0.1"
"""Address of the server: only this machine can connect."""


@options.group
class ServerOptions:
    """Options of the server."""

    port: int | None = options.output_option(
        None,
        "--port N",
        f"Port of the page on this machine; 0 takes any free one. Default: {PORT}, or the next "
        "free one.",
        parser=options.integer_parser(65535, min_value=0),
    )
    store: Path = options.output_option(
        Path(STORE), "--store FILE", "SQLite file of all answers; several servers may share it."
    )
    no_browser: bool = options.output_option(
        False, "--no-browser", "Print the address, but do not open a browser."
    )
    quiet: bool = options.output_option(False, "--quiet", "Print only errors.", callback=set_quiet)
    workers: int | None = options.solve_option(
        None,
        "--workers N",
        "Processes that solve. Default: as many as there are cores.",
        parser=options.integer_parser(256),
    )


@options.command("poetmodel explore mobilenetv2 --device rpi4b --ram 40%")
def explore(
    source: options.GraphOptions,
    costing: options.CostOptions,
    limits: Annotated[Limits, options.without(*UNEXPLORED_LIMITS)],
    search: Annotated[SearchOptions, options.without("method", "formulation")],
    server_options: ServerOptions,
) -> None:
    """Open a local page: change the RAM budget with a slider and see the schedule change."""
    missing_packages = [
        name for name in ("fastapi", "uvicorn", "jinja2", "plotly") if not installed_version(name)
    ]
    if missing_packages:
        raise MissingExtraError(
            f"explore: needs {', '.join(missing_packages)}, not installed here; "
            "pip install 'poetmodel[explore]' installs what it needs"
        )
    catalogue, settings, initial = initial_state(source, costing, limits)
    from poetmodel.explore.running import serve

    listener = _bind_socket(server_options.port)

    def on_ready(address: str) -> None:
        print_text(f"The explorer: {address}", "Ctrl-C ends it; answers remain in the store.")
        sys.stdout.flush()  # a program that reads the pipe waits for this line
        if not server_options.no_browser:
            webbrowser.open(address)

    print_note(f"starting; answers are stored in {server_options.store}")
    serve(
        listener,
        store=server_options.store,
        catalogue=catalogue,
        initial={**settings.to_dict(), **initial},
        search=search,
        workers=server_options.workers,
        on_ready=on_ready,
    )


def initial_state(
    source: options.GraphOptions, costing: options.CostOptions, limits: Limits
) -> tuple[Catalogue, ExplorerSettings, dict[str, Any]]:
    """Return the catalogue with the given files, the initial settings and slider positions.

    The positions are ``ram_bytes`` [B] and ``deadline_s`` [s], None without the option. For a step
    file and a device, prints the size that ``--tile auto`` chooses.
    """
    from poetmodel.case.tiles import resolve_sizes
    from poetmodel.explore.settings import ExplorerSettings, catalogue_with_files
    from poetmodel.schedule.io import validate_model

    case, hints = resolve_sizes(source.case(costing, limits=limits))
    print_warnings(hints, kind="hint")
    limits = case.limits
    if source.model is not None and source.graph is not None:
        raise InputError(
            f"MODEL {source.model!r} and --graph {source.graph!r} exclude each other: give only one"
        )
    name, is_built_in = source.graph or source.model or "mobilenetv2", _is_built_in(source)
    is_step = not is_built_in and Case(source=name).is_step_file
    catalogue = catalogue_with_files(
        graph=None if is_built_in or is_step else name,
        step=name if is_step else None,
        device=costing.device,
        profile=costing.profile,
    )
    device = costing.device or "rpi4b"
    settings = validate_model(
        ExplorerSettings,
        {
            "model": name if is_built_in else next(iter((*catalogue.graphs, *catalogue.steps))),
            "device": next(iter((*catalogue.profiles, *catalogue.devices)), device),
            "shape": case.shape,
            "limits": replace(
                limits, ram=None, deadline=None, minimize=limits.minimize or Quantity.ENERGY
            ),
        },
        kind="settings",
    )
    case = catalogue.case(settings)
    graph = case.load_graph()
    costs = read_costs(graph, costing) if costing.is_given else case.load_costs(graph)
    # Raise for invalid limits before the server starts.
    problem = Problem.from_limits(graph, costs, limits)
    initial = {
        "ram_bytes": None if limits.ram is None else problem.ram_budget_bytes,
        "deadline_s": problem.deadline_s,
    }
    return catalogue, settings, initial


def _is_built_in(source: options.GraphOptions) -> bool:
    """Return whether the graph is built in or not given; False for a file, an error if unknown."""
    from poetmodel.graph.catalogue import check_model_name, model_names

    if source.graph is not None:
        return False
    if source.model is None or source.model in model_names():
        return True
    if Path(source.model).exists() or source.model.endswith(".json"):
        return False
    check_model_name(source.model)
    return True


def _bind_socket(port: int | None) -> socket.socket:
    """Return a TCP socket bound to `port` of `LOOPBACK`, or to the first free default port."""
    ports = range(PORT, PORT + N_PORTS) if port is None else (port,)
    for candidate_port in ports:
        # asyncio sends replies without delay only if the socket's protocol is explicitly TCP.
        bound_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound_socket.bind((LOOPBACK, candidate_port))
        except OSError:
            bound_socket.close()
        else:
            return bound_socket
    if port is None:
        raise InputError(f"no port from {PORT} to {PORT + N_PORTS - 1} is free; give --port N")
    raise InputError(f"--port {port}: in use or not permitted; choose another")
