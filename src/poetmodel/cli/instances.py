"""``poetmodel bench instances`` and ``bench check``: the instance library and its solutions."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli.failures import ExitStatus
from poetmodel.cli.output import listing
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from poetmodel.sweeps.instances import CheckedSolution

WRITE, CHECK = "instances", "check"
"""Values of the argument NAME of ``bench`` that are not figures."""
N_FOLDERS: Final = {WRITE: 1, CHECK: 2}
"""Number of folder arguments, by the value of NAME."""
EXPECTED_FOLDERS: Final = {
    WRITE: "the folder of the library, such as 'poetmodel bench instances library'",
    CHECK: "two folders, such as 'poetmodel bench check library solutions'",
}
"""Expected folder arguments for error messages, by the value of NAME."""
_REGISTRY: Final = "instances"
"""Module in the folder ``bench`` of a checkout that defines the problems."""


def write_instances(folder: Path, mps: str | None) -> Reply:
    """Write the library to a folder, with MPS files of the names in `mps`; reply counts by kind."""
    from collections import Counter

    from poetmodel.sweeps.instances import write_library

    registry = _import_registry()
    names = [] if mps is None else [name.strip() for name in mps.split(",") if name.strip()]
    lines = write_library(registry.instances(), folder, mps=names, remark=registry.MOCCASIN)
    kinds = Counter(line["kind"] for line in lines)
    rows = [(kind, f"{count:,}") for kind, count in kinds.items()]
    table = listing(f"Problems in {folder}", ("kind", "problems"), rows, n_text_columns=1)
    document = {"folder": str(folder), "instances": lines}
    return Reply(document=document, text=(table, registry.MOCCASIN))


def check_solutions(folder: Path, solutions: Path) -> Reply:
    """Verify solutions against a library; reply the findings, with status 3 if one is invalid."""
    from poetmodel.sweeps.instances import Finding
    from poetmodel.sweeps.instances import check_solutions as verify_solutions

    checked_solutions = verify_solutions(folder, solutions)
    heads = ("problem", "finding", "overhead", "best known", "bound")
    rows = [
        (
            checked.name,
            str(checked.finding),
            *(
                _format_overhead(value, checked.unit)
                for value in (checked.overhead, checked.best, checked.bound)
            ),
        )
        for checked in checked_solutions
    ]
    bugs = [
        f"{checked.name}: valid, but excluded by a proven bound or infeasibility; please report "
        "this bug"
        for checked in checked_solutions
        if checked.finding == Finding.BELOW_BOUND
    ]
    faults = [
        f"{checked.name}: {checked.reason}"
        for checked in checked_solutions
        if checked.finding == Finding.INVALID
    ]
    table = listing(f"Solutions in {solutions}", heads, rows, n_text_columns=2, whole_names=False)
    return Reply(
        document={"solutions": [_checked_values(checked) for checked in checked_solutions]},
        text=(table,),
        errors=(*bugs, *faults),
        status=ExitStatus.INFEASIBLE if faults else ExitStatus.SUCCESS,
    )


def _checked_values(checked: CheckedSolution) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(checked) | {"finding": str(checked.finding)}


def _format_overhead(value: float | None, unit: str) -> str:
    """Format an overhead in s if that is the `unit`, else in J; "-" for None."""
    if value is None:
        return "-"
    return format_seconds(value) if unit == "s" else format_joules(value)


def _import_registry() -> Any:
    """Import and return the registry of problems of a checkout; add its ``bench`` to `sys.path`.

    The checkout is that of an editable install; otherwise it contains the working folder. An
    installed package contains neither the captured graphs nor the records.
    """
    working_folder = Path.cwd()
    for root in (Path(str(files("poetmodel"))).parents[1], working_folder, *working_folder.parents):
        if (root / "bench" / f"{_REGISTRY}.py").is_file():
            folder = str(root / "bench")
            sys.path[:0] = [folder] if folder not in sys.path else []
            return import_module(_REGISTRY)
    raise InputError(
        "bench instances: the captured graphs and the records are in the repository; clone it, and "
        "run this command in the clone"
    )
