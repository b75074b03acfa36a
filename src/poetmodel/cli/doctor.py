"""``poetmodel doctor``: which solvers and extras work, and how to install the others."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.cli.failures import ExitStatus
from poetmodel.cli.options import OutputOptions, command
from poetmodel.cli.output import figures, print_json, print_text, show
from poetmodel.files import installed
from poetmodel.report.presenter import Fact, row
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


DEFAULT_BACKEND: Final = "highs"
"""The solver that must work; all others are optional."""

SOLVERS: Final = ("highspy", "pyscipopt", "gurobipy")

EXTRAS: Final = {
    "torch": ("torch", "trace and profile"),
    "onnx": ("onnx", "ONNX files"),
    "keras": ("keras", "models of Keras"),
    "torchao": ("quantize", "fronts in int8"),
    "plotly": ("report", "interactive pictures"),
    "matplotlib": ("report", "pictures in files"),
    "jinja2": ("report", "report pages"),
    "pyscipopt": ("scip", "the SCIP back end, and conflicts among constraints of your own"),
    "gurobipy": ("gurobi", "the Gurobi back end"),
    "distributed": ("cluster", "sweeps on a Dask cluster"),
}
"""For each optional package, the extra that installs it and its purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The state of a solver or package."""

    name: str
    state: str
    """``works``, ``installed``, ``missing`` or ``broken``."""
    versions: str
    """Its versions; empty if it is missing."""
    remark: str
    """Its purpose, its limits, or what to do."""


@command("poetmodel doctor")
def doctor(output: OutputOptions) -> None:
    """Check solvers, licences and optional packages, and show how to install the missing ones."""
    backends, extras = list(_backends()), list(_extras())
    works = any(
        backend.name == DEFAULT_BACKEND and backend.state == "works" for backend in backends
    )
    if output.json:
        print_json(
            {
                "poetmodel": __version__,
                "python": platform.python_version(),
                "works": works,
                "backends": [asdict(finding) for finding in backends],
                "extras": [asdict(finding) for finding in extras],
            }
        )
    else:
        print_text(f"poetmodel {__version__} on Python {platform.python_version()}", "")
        packages = figures("Optional packages", _facts(extras))
        show(figures("Back ends", _facts(backends)), "", packages)
    raise typer.Exit(ExitStatus.SUCCESS if works else ExitStatus.NO_BACKEND)


def _facts(findings: Sequence[Finding]) -> Iterator[Fact]:
    for finding in findings:
        versions = (
            f"{finding.versions}; " if finding.versions and finding.remark else finding.versions
        )
        yield row(finding.name, finding.state, f"{versions}{finding.remark}")


def _backends() -> Iterator[Finding]:
    from poetmodel.backends.registry import LICENCE_SIZE, backend, backend_names, refusal, try_out
    from poetmodel.errors import BackendError, BackendUnavailableError

    for name in backend_names():
        try:
            numbers = backend(name).versions()
        except BackendUnavailableError as error:
            yield Finding(name=name, state="missing", versions="", remark=str(error))
            continue
        versions = ", ".join(f"{part} {number}" for part, number in numbers.items())
        state, remark = "works", ""
        try:
            try_out(name)
            if refusal(name, columns=LICENCE_SIZE, rows=1) is not None:
                remark = "the licence is limited to small models"
        except BackendError as error:
            state, remark = "broken", str(error)
        yield Finding(name=name, state=state, versions=versions, remark=remark)


def _extras() -> Iterator[Finding]:
    for package, (extra, purpose) in EXTRAS.items():
        version = installed(package)
        state = "missing" if version is None else "installed"
        advice = "" if version is not None else f": pip install 'poetmodel[{extra}]'"
        yield Finding(name=package, state=state, versions=version or "", remark=purpose + advice)
