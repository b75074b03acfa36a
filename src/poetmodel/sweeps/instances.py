"""The instance library: problems as files with the best known results, and checks of solutions.

A library is a folder. `INDEX` has one JSON line for each problem: the files of its graph, costs and
device, its limits as in the ``problem`` of a schedule file, and the best known results.
`check_solutions` verifies solution files: schedules or execution orders that other solvers found.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, Field

from poetmodel.device import Costs, Device
from poetmodel.errors import (
    InputError,
    PoetModelError,
    ScheduleError,
    convert_errors,
    join_names,
    quote,
    suggest_names,
)
from poetmodel.files import (
    parse_json,
    raise_write_errors,
    read_bytes,
    read_text,
    shipped_folder,
    write_text,
)
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.headers import check_version
from poetmodel.model import build
from poetmodel.planner import verify
from poetmodel.problem import Quantity
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.schedule.identity import VERSION
from poetmodel.schedule.io import (
    Finite,
    GraphEntry,
    Index,
    Pairs,
    ProblemEntry,
    Strict,
    validate_model,
)
from poetmodel.sweeps.measurement import git_commit
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.problem import Problem

README: Final = Path(__file__).with_name("library_readme.md")
"""Template of the README of a library."""
INDEX: Final = "instances.jsonl"
"""File with a line for each problem."""
CHECKSUMS: Final = "SHA256SUMS"
"""File with the SHA-256 of all other files, for ``sha256sum --check``."""
MPS_NODES_BELOW: Final = 60
"""Number of nodes below which a problem always has an MPS file."""
FIRST_MPS_NODES_BELOW: Final = 150
"""Number of nodes of a graph below which its first problem always has an MPS file."""
TOLERANCE: Final = 1e-6
"""Difference up to which two overheads are equal, relative to the larger one, or to a millionth of
the baseline if that is more."""
SCHEDULE, ORDER = ".schedule.json", ".order.json"
"""Suffixes of solution files: a schedule file, or a JSON list of nodes in execution order."""
_KEYS: Final = frozenset(
    {"name", "graph", "costs", "device", "problem", "unit", "baseline", "best"}
)
"""Required keys of a line of the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestResults:
    """The best results on record for a problem, in the unit of the minimized quantity."""

    overhead: float | None = None
    """Smallest known overhead of a schedule; None if no schedule is known."""
    method: str | None = None
    """Method that found the schedule."""
    commit: str | None = None
    """Commit of poetmodel that found the schedule."""
    bound: float = 0.0
    """Largest proven lower bound on the overhead."""
    bound_commit: str | None = None
    """Commit of poetmodel that proved the bound."""
    infeasible: bool = False
    """Whether it is proven that no schedule meets all limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A named problem with the best known results."""

    name: str
    """Unique name, also of the MPS file and of solution files."""
    kind: str
    """Group of problems, such as ``zoo``."""
    problem: Problem
    """The problem, which minimizes energy or time: the index has no other units."""
    best: BestResults
    """The best results on record."""
    schedule: Schedule | None = None
    """A schedule with the overhead of `best`; None if none is on record."""


def file_name(*words: object) -> str:
    """Return the words in lower case, joined by hyphens, which also replace unusual characters."""
    text = "-".join(map(str, words)).lower()
    return re.sub(r"[^a-z0-9.+]+", "-", text).strip("-")


def _unknown_problem_text(origin: str, name: str, known_names: Iterable[str]) -> str:
    hint = suggest_names(name, known_names)
    return f"{origin}: no problem is called {name!r}" + (f"; {hint}" if hint else "")


# -- writing ---------------------------------------------------------------------------------------


def write_library(
    instances: Iterable[Instance], folder: Path, *, mps: Collection[str] = (), remark: str = ""
) -> list[dict[str, Any]]:
    """Write an instance library, with README and checksums; return the index lines as JSON values.

    `folder` must be empty or missing. `mps` has the names of large problems that get an MPS file,
    too; `remark` is a sentence for the README. Raises `InputError` for invalid or inconsistent
    problems, and `TooLargeError` for a too large MPS file. Files written before an error remain.
    """
    instance_list = list(instances)
    names = [instance.name for instance in instance_list]
    if unknown_names := [name for name in mps if name not in names]:
        raise InputError(_unknown_problem_text("--mps", name, names) for name in unknown_names)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: expected an empty folder, or one that does not exist")
    for name in ("graphs", "costs", "devices", "mps", "schedules"):
        with raise_write_errors(folder, "the folder cannot be made"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    writer = _LibraryWriter(folder, frozenset(mps))
    index_lines = [writer.write_problem(instance) for instance in instance_list]
    index_text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in index_lines)
    write_text(folder / INDEX, index_text)
    write_text(folder / "README.md", _readme_text(index_lines, remark))
    write_text(folder / CHECKSUMS, "".join(_checksums(folder)))
    return index_lines


class _LibraryWriter:
    """Writer of a library, which writes each graph, cost table and device once."""

    def __init__(self, folder: Path, mps: frozenset[str]) -> None:
        self._folder = folder
        self._mps = mps
        self._graph_files: dict[str, str] = {}
        self._cost_files: dict[tuple[str, str], tuple[str, Costs]] = {}

    def write_problem(self, instance: Instance) -> dict[str, Any]:
        """Write the files of a problem, and return its line of the index."""
        problem = instance.problem
        if problem.minimize not in {Quantity.ENERGY, Quantity.TIME}:
            raise InputError(f"{instance.name}: only problems of energy or time are written")
        costs, graph, device = problem.costs, problem.graph, problem.costs.device
        objective, is_first = problem.objective, graph.sha256 not in self._graph_files
        return {
            "name": instance.name,
            "kind": instance.kind,
            "graph": self._write_graph(graph),
            "graph_sha256": graph.sha256,
            "nodes": len(graph.nodes),
            "tensors": len(graph.tensors),
            "costs": self._write_costs(graph, costs),
            "costs_sha256": problem.costs_sha256,
            "device": None if device is None else self._write_device(device),
            "problem": problem.to_dict(),
            "min_ram_bytes": problem.floor.bytes,
            "keep_all_bytes": checkpoint_all_peak_bytes(graph),
            "unit": "s" if problem.minimize == Quantity.TIME else "J",
            "baseline": objective.baseline,
            "best": asdict(instance.best),
            "mps": self._write_mps(instance, is_first=is_first),
            "schedule": self._write_schedule(instance),
        }

    def _write_graph(self, graph: Graph) -> str:
        """Write a graph, once for its SHA-256; return the file's path relative to the library."""
        digest = graph.sha256
        if digest not in self._graph_files:
            name = f"graphs/{file_name(graph.name, digest[:8])}.graph.json"
            graph.save(self._folder / name)
            self._graph_files[digest] = name
        return self._graph_files[digest]

    def _write_costs(self, graph: Graph, costs: Costs) -> str:
        """Write the costs of a graph and device once, and return the path in the library."""
        source = "measured" if costs.device is None else costs.device.short_name
        key = graph.sha256, source
        if key not in self._cost_files:
            name = f"costs/{file_name(graph.name, graph.sha256[:8], source)}.profile.csv"
            costs.save(self._folder / name)
            self._cost_files[key] = name, costs
        name, written_costs = self._cost_files[key]
        if (written_costs.compute, written_costs.pages) != (costs.compute, costs.pages):
            raise InputError(f"{name}: two problems have different costs of one graph and device")
        return name

    def _write_device(self, device: Device) -> str:
        """Copy the shipped file of a device once, and return the copy's path in the library."""
        name = f"{device.short_name}.toml"
        if device != Device.load(device.short_name):
            raise InputError(f"device {device.short_name}: differs from the shipped one")
        if not (self._folder / "devices" / name).exists():
            write_text(self._folder / "devices" / name, read_text(shipped_folder("devices") / name))
        return f"devices/{name}"

    def _write_schedule(self, instance: Instance) -> str | None:
        """Write the best schedule of a problem; return its path in the library, if any."""
        schedule, best, problem = instance.schedule, instance.best.overhead, instance.problem
        if schedule is None or best is None:
            return None
        verdict = verify(problem, schedule)
        overhead = problem.objective.overhead_of(verdict.simulation)
        if verdict.violations or overhead > best + _tolerance(problem, overhead, best):
            reason = join_names(verdict.violations) or f"overhead {overhead!r}, expected {best!r}"
            raise InputError(f"{instance.name}: the best schedule on record fails: {reason}")
        name = f"schedules/{instance.name}{SCHEDULE}"
        text = json.dumps(
            {
                "instance": instance.name,
                "overhead": overhead,
                **schedule.entries(has_state=bool(problem.graph.state_tensors)),
            },
            separators=(",", ":"),
        )
        write_text(self._folder / name, text + "\n")
        return name

    def _write_mps(self, instance: Instance, *, is_first: bool) -> dict[str, Any] | None:
        """Write the MPS file of ``compact`` for a problem; return ``file`` and ``objective_unit``.

        None, without a file, for a large problem that is not requested by name.
        """
        name = instance.name
        max_nodes = FIRST_MPS_NODES_BELOW if is_first else MPS_NODES_BELOW
        if not (len(instance.problem.graph.nodes) < max_nodes or name in self._mps):
            return None
        import pyomo.environ  # noqa: F401 - registers the writers of files

        model = build(instance.problem, "compact")
        path = f"mps/{name}.mps"
        model.write(str(self._folder / path), io_options={"symbolic_solver_labels": True})
        return {"file": path, "objective_unit": model.objective_unit}


def _checksums(folder: Path) -> Iterator[str]:
    """Yield a line in the format of ``sha256sum`` for each file of a folder, except `CHECKSUMS`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            digest = hashlib.sha256(read_bytes(path)).hexdigest()
            yield f"{digest}  {path.relative_to(folder).as_posix()}\n"


def _readme_text(lines: Sequence[Mapping[str, Any]], remark: str) -> str:
    """Return the README of a library from its index lines; `remark` is a sentence in it."""
    kinds = Counter(line["kind"] for line in lines)
    best_results = [line["best"] for line in lines]
    n_proved = sum(_is_proved(entry) for entry in best_results)
    kind_rows = "".join(f"| {kind} | {count:,} |\n" for kind, count in kinds.items())
    return README.read_text(encoding="utf-8").format(
        problems=len(lines),
        proved=n_proved,
        kind_rows=kind_rows,
        commit=git_commit() or "an installed package",
        remark=remark,
        version=__version__,
        index=INDEX,
        checksums=CHECKSUMS,
        mps_nodes_below=MPS_NODES_BELOW,
        first_mps_nodes_below=FIRST_MPS_NODES_BELOW,
        schedules=sum(line["schedule"] is not None for line in lines),
        schedule=SCHEDULE,
        order=ORDER,
    )


def _is_proved(best: Mapping[str, Any]) -> bool:
    """Return whether a schedule is proved optimal to 1 %, or the problem is proved infeasible."""
    overhead: float | None = best["overhead"]
    is_closed = overhead is not None and overhead - best["bound"] <= 0.01 * overhead
    return bool(best["infeasible"] or is_closed)


# -- checking --------------------------------------------------------------------------------------


class Finding(StrEnum):
    """Result of the comparison of a schedule with the best known schedule and bound."""

    INVALID = "not valid"
    """The schedule violates a rule or a limit, or its file cannot be read."""
    WORSE = "worse"
    """The overhead is above the smallest known overhead by more than `TOLERANCE`."""
    EQUAL = "equal"
    """The overhead equals the smallest known overhead, within `TOLERANCE`."""
    BETTER = "better"
    """The overhead is below the smallest known one by more than `TOLERANCE`, or none is known."""
    BELOW_BOUND = "below the bound"
    """The schedule is valid, but contradicts a proven bound or infeasibility of the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSolution:
    """The verifier's finding on a solution file."""

    name: str
    """Name of the problem."""
    finding: Finding
    """Comparison with the best known schedule and bound."""
    overhead: float | None = None
    """Overhead of the schedule, in the unit of the problem; None if it is not valid."""
    best: float | None = None
    """Smallest known overhead; None if none is known."""
    bound: float = 0.0
    """Proven lower bound on the overhead."""
    unit: str = "J"
    """Unit of the overheads: ``J`` or ``s``."""
    reason: str = ""
    """Reason why the schedule is not valid: an error, or its first violations; empty if valid."""


def read_library(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a library's index by name; of lines with one name, the last."""
    path = folder / INDEX
    if not path.is_file():
        raise InputError(f"{folder}: expected an instance library, with {INDEX}")
    lines: dict[str, dict[str, Any]] = {}
    for line_number, line_text in enumerate(read_text(path).splitlines(), start=1):
        with convert_errors(InputError, f"{path}, line {line_number}"):
            line = parse_json(line_text, expected="library index")
            if not isinstance(line, dict) or not line.keys() >= _KEYS:
                raise InputError(f"expected an object with the keys {', '.join(sorted(_KEYS))}")
        lines[str(line["name"])] = line
    return lines


def check_solutions(folder: Path, solutions: Path) -> list[CheckedSolution]:
    """Verify the solution files of a folder against an instance library; return the findings.

    Files are ``NAME.schedule.json``, which may instead state the name as ``instance``, or
    ``NAME.order.json``. An invalid solution is the finding INVALID. Raises `InputError` for an
    invalid library, an unknown name, no solution, or two of one problem.
    """
    index_lines = read_library(folder)
    path_by_name: dict[str, Path] = {}
    for path in sorted(solutions.glob("*.json")):
        name = path.name.removesuffix(SCHEDULE).removesuffix(ORDER)
        if name == path.name:
            continue
        if name not in index_lines and path.name.endswith(SCHEDULE):
            name = _stated_instance(path) or name
        if name in path_by_name:
            raise InputError(f"{path}: {path_by_name[name].name} solves the same problem; keep one")
        path_by_name[name] = path
    if not path_by_name:
        raise InputError(f"{solutions}: expected solutions, NAME{SCHEDULE} or NAME{ORDER}")
    if unknown_names := [name for name in path_by_name if name not in index_lines]:
        raise InputError(
            _unknown_problem_text(str(path_by_name[name]), name, index_lines)
            for name in unknown_names
        )
    problem_reader = _ProblemReader(folder)
    return [
        _check_solution(line, path_by_name[name], problem_reader)
        for name, line in index_lines.items()
        if name in path_by_name
    ]


class _ProblemReader:
    """Reader of the problems of a library, which caches the latest graph and costs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._graphs: dict[str, Graph] = {}
        self._costs: dict[tuple[str, str | None], Costs] = {}

    def read_problem(self, line: Mapping[str, Any]) -> Problem:
        """Return the problem of a line of the index; checksums are not compared."""
        entry = validate_model(ProblemEntry, line["problem"], kind="library")
        graph_file, costs_key = line["graph"], (line["costs"], line["device"])
        if graph_file not in self._graphs:
            self._graphs = {graph_file: Graph.load(self._path(graph_file))}
        if costs_key not in self._costs:
            costs_file, device_file = costs_key
            device = None if device_file is None else Device.load(self._path(device_file))
            self._costs = {costs_key: Costs.load(self._path(costs_file), device=device)}
        return entry.to_problem(self._graphs[graph_file], self._costs[costs_key])

    def _path(self, name: str) -> Path:
        """Return the path of a file of the library; raise `InputError` for a path outside of it."""
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise InputError(f"{name}: the file is outside the library")
        return path


class SolutionFile(Strict):
    """Content of a solution file: relations, and what it states; other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    instance: str | None = None
    """Name of the problem; None if only the file is named like it."""
    overhead: Finite | None = None
    """Claimed overhead, in the unit of the problem; None without a claim."""
    graph: GraphEntry | None = None
    R: Pairs
    S_RAM: Pairs
    S_AUX: Pairs = Field(default_factory=list)
    M_in: Pairs = Field(default_factory=list)
    M_out: Pairs = Field(default_factory=list)
    resident: list[Index] = Field(default_factory=list)


def _read_solution(path: Path, name: str, graph: Graph) -> tuple[Schedule, float | None]:
    """Return the schedule of a solution file and the overhead that the file claims, if any."""
    if not path.name.endswith(SCHEDULE):
        order = parse_json(read_text(path), expected="execution order")
        if not isinstance(order, list) or not all(type(k) is int for k in order):
            raise ScheduleError("expected a JSON list of whole numbers, the indices of nodes")
        return Schedule.from_order(graph, order), None
    values = parse_json(read_text(path), expected="solution")
    if isinstance(values, dict):
        check_version(values, (VERSION,))
    file = validate_model(SolutionFile, values, kind="solution")
    if file.instance not in (None, name):
        raise ScheduleError(f"instance: expected {name!r}, got {quote(file.instance)}")
    if file.graph is not None and file.graph.sha256 != graph.sha256:
        raise ScheduleError(
            f"graph.sha256: expected {graph.sha256} of the library, got {file.graph.sha256}"
        )
    return Schedule.from_entries(vars(file), GraphIdentity.from_graph(graph)), file.overhead


def _stated_instance(path: Path) -> str | None:
    with suppress(InputError):
        values = parse_json(read_text(path), expected="solution")
        if isinstance(values, dict) and isinstance(values.get("instance"), str):
            return str(values["instance"])
    return None


def _tolerance(problem: Problem, *overheads: float) -> float:
    return TOLERANCE * max(*overheads, 1e-6 * problem.objective.baseline)


def _check_solution(
    line: Mapping[str, Any], path: Path, problem_reader: _ProblemReader
) -> CheckedSolution:
    """Verify the solution file `path`; compare it with the best results in a line of the index."""
    name, best = str(line["name"]), line["best"]
    known_values = {
        "name": name,
        "best": best["overhead"],
        "bound": best["bound"],
        "unit": line["unit"],
    }
    problem = problem_reader.read_problem(line)
    try:
        schedule, claimed_overhead = _read_solution(path, name, problem.graph)
        verdict = verify(problem, schedule)
    except PoetModelError as error:
        return CheckedSolution(**known_values, finding=Finding.INVALID, reason=str(error))
    if verdict.violations:
        return CheckedSolution(
            **known_values, finding=Finding.INVALID, reason=join_names(verdict.violations)
        )
    overhead = problem.objective.overhead_of(verdict.simulation)
    tolerance = _tolerance(problem, overhead, best["overhead"] or 0.0)
    if claimed_overhead is not None and abs(claimed_overhead - overhead) > tolerance:
        reason = f"overhead: the file says {claimed_overhead!r}, the simulation gives {overhead!r}"
        return CheckedSolution(**known_values, finding=Finding.INVALID, reason=reason)
    if best["infeasible"] or overhead < best["bound"] - tolerance:
        finding = Finding.BELOW_BOUND
    elif best["overhead"] is None or overhead < best["overhead"] - tolerance:
        finding = Finding.BETTER
    else:
        finding = Finding.EQUAL if overhead <= best["overhead"] + tolerance else Finding.WORSE
    return CheckedSolution(**known_values, finding=finding, overhead=overhead)
