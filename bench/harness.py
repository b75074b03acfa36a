"""Shared code of the studies: records, runs in fresh processes, and the runner."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import resource
import signal
import sys
import time
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import poetmodel as pm
from poetmodel.errors import InputError, PoetModelError, WorkersLostError
from poetmodel.graph.catalogue import load_model
from poetmodel.process import LocalProcesses
from poetmodel.result import Termination
from poetmodel.sweeps.measurement import FAILED, common_fields
from poetmodel.sweeps.runner import Progress, RunQueue, shard
from poetmodel.sweeps.store import RecordFile
from poetmodel.sweeps.workers import ModuleFunction, ShippingPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from poetmodel.result import SolveResult
    from poetmodel.sweeps.measurement import Record

MIN_CORE_FRACTION: Final = 0.8
"""Minimum ratio of CPU time to its limit for a run that ended at its limit."""
ATTEMPTS: Final = 6
"""Maximum number of attempts at a run that ended at its limit."""
GRACE_S: Final = 120.0
"""Time after its limit at which the process of a run is killed [s]."""
PRELOADED: Final = (
    "pyomo.environ",
    "highspy",
    "scipy.sparse",
    "networkx",
    "poetmodel.backends.highs",
    "poetmodel.solver",
    "poetmodel.device",
)
"""Modules that each solving process loads before its time starts."""
REQUIRED: Final = ""
"""Marks settings without a default."""
DONE: Final = "done"
"""Status of measurements without a solver's status."""


def make_record(kind: str, name: str, **facts: Any) -> Record:
    """Return the record of a measurement: `facts`, and date, machine, commit and load of now."""
    common = {"load_average": os.getloadavg()[0], "status": DONE}
    return {**common_fields(kind, name), **common, **facts}


def describe_result(result: SolveResult) -> Record:
    """Return the record fields of a solve: claims, metrics, times, statistics and versions.

    ``gaps`` has pairs of seconds and gap.
    """
    same_names = (
        *("reason", "formulation", "backend", "requested_gap", "gap", "objective_bound"),
        *("overhead_j", "overhead_bound_j", "baseline_energy_j", "peak_ram_bytes"),
        *("build_s", "solve_s", "primal_integral_s"),
    )
    return {
        **{name: getattr(result, name) for name in same_names},
        "status": str(result.status),
        "termination": str(result.termination),
        "objective_value": result.value,
        "ram_budget_bytes": result.problem.ram_budget_bytes,
        "deadline_s": result.problem.deadline_s,
        "violations": len(result.violations),
        "gaps": [(round(at_s, 3), float(f"{gap:.4g}")) for at_s, gap in result.gap_over_time],
        "statistics": dict(result.statistics),
        "versions": dict(result.versions),
    }


def open_records(path: Path) -> RecordFile:
    """Open a file of records whose keys are the fields of their runs."""
    return RecordFile(path, lambda record: make_run_key(record["cell"]))


def make_run_key(fields: dict[str, Any]) -> str:
    """Return the key of a run in a file of records, made of all its fields."""
    return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run whose key in files of records consists of all its fields."""

    @property
    def key(self) -> str:
        """Key of the run in records."""
        return make_run_key(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the run's fields."""
        return asdict(self)

    def with_limit(self, limit_s: float) -> Self:
        """Return the run with another limit [s]."""
        return replace(self, limit_s=limit_s)  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of a study without its own run class: its name in records and its fields."""

    name: str
    fields: dict[str, Any]

    @property
    def key(self) -> str:
        """Key of the run in records."""
        return make_run_key(self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the run's fields."""
        return self.fields

    def with_limit(self, limit_s: float) -> Self:
        """Return the run with another limit [s]."""
        return replace(self, fields={**self.fields, "limit_s": limit_s})


# -- processes -------------------------------------------------------------------------------------


class ThisProcess(Executor):
    """Executor of runs in this process, in sequence; for methods that load no solver."""

    def submit(self, measure: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call a function immediately; the future has its result or exception."""
        future: Future[Any] = Future()
        try:
            future.set_result(measure(*arguments))
        except Exception as error:  # noqa: BLE001 - as in other executors
            future.set_exception(error)
        return future


# -- limits in processor time ----------------------------------------------------------------------


def measure_with_cpu_limit(
    limit_s: float, measure: Callable[[float], Record], *, core_fraction: float = 1.0
) -> Record:
    """Measure a run within a limit of CPU time; return its record fields, with times and attempts.

    The package limits wall time. A run that met its limit is repeated with another wall time until
    its CPU time is the limit within a factor of `MIN_CORE_FRACTION`; only the last attempt counts.
    After `ATTEMPTS` attempts its status is `FAILED`. `core_fraction` is the expected fraction of a
    core, by which the first wall time is divided.
    """
    facts: Record = {}
    for attempt in range(1, ATTEMPTS + 1):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        facts = measure(limit_s / core_fraction)
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        facts = facts | {"seconds": seconds, "cpu_s": cpu_s, "attempts": attempt}
        is_at_limit = facts.get("termination") == Termination.TIME_LIMIT
        if not is_at_limit or MIN_CORE_FRACTION <= cpu_s / limit_s <= 1 / MIN_CORE_FRACTION:
            return facts
        core_fraction *= cpu_s / limit_s
    return facts | {"status": FAILED, "reason": f"the processor was busy in {ATTEMPTS} attempts"}


def measure_core_fraction(work: Callable[[], object]) -> float:
    """Execute `work`; return the fraction of a core that it received, at least 0.1."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    fraction = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
    return min(1.0, max(0.1, fraction))


def measure_peak_memory_bytes(process_kind: int = resource.RUSAGE_SELF) -> int:
    """Return the peak resident memory of this process, or of the largest of its children [B]."""
    peak = resource.getrusage(process_kind).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def warm_up() -> None:
    """Load the solver and its modelling library by a small solve, so that measurements do not."""
    graph = load_model("mlp")
    costs = pm.Costs.estimate(graph, pm.Device.load("mkr1000"))
    pm.solve(pm.Problem(graph, costs, ram="70%"), time_limit=5.0)


# -- studies ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A series of runs and the function that measures one of them."""

    name: str
    """Suffix of its files of records: ``*-NAME.jsonl``."""
    kind: str
    """Kind of its records."""
    runs: Callable[..., Iterable[Any]]
    """Function that returns the runs; its parameters are settings with defaults."""
    smoke_runs: Callable[[], Iterable[Any]]
    """Function that returns each kind of run at its smallest size."""
    measure: Callable[[dict[str, Any], Any], Record]
    """Function that returns the record of a run from its fields and its `start_of`."""
    start_of: Callable[[Any, RecordFile, Mapping[str, Any]], Any] = lambda *_: None
    """Function that returns the second argument of `measure` from a run, the records so far and the
    settings, such as the folder of a source; by default None."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings with their defaults."""
    has_own_process: bool = True
    """Whether each run has its own process."""
    preloaded: Sequence[str] = PRELOADED
    """Modules loaded in each process before its run."""
    grace_s: float = GRACE_S
    """Time after its limit at which a run is killed [s]."""
    key_of: Callable[[Record], Any] = lambda record: make_run_key(record["cell"])
    """Function that returns the key of a record's run."""
    summarize: Callable[[Iterable[Record]], str] | None = None
    """Function that returns the summary of all records, printed at the end."""

    def defaults(self) -> dict[str, Any]:
        """Return the default of each setting, by name; `REQUIRED` if there is none."""
        parameters = inspect.signature(self.runs).parameters
        return {name: parameter.default for name, parameter in parameters.items()} | dict(
            self.settings
        )

    def select_runs(self, settings: Mapping[str, Any]) -> list[Any]:
        """Return the runs for these settings. Raises `InputError` for unknown values."""
        parameters = inspect.signature(self.runs).parameters
        return list(self.runs(**{name: settings[name] for name in parameters}))


def parse_setting(study: Study, text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``; commas separate values of a setting whose default is a tuple.

    Raises ValueError for a name that is not a setting of the study.
    """
    name, _, value_text = text.partition("=")
    defaults = study.defaults()
    if name not in defaults:
        raise ValueError(f"{name}: expected one of {', '.join(defaults) or 'none'}")
    is_tuple = isinstance(defaults[name], tuple)
    try:
        value = ast.literal_eval(value_text)
    except (ValueError, SyntaxError):
        value = tuple(value_text.split(",")) if is_tuple else value_text
    return name, (value,) if is_tuple and not isinstance(value, tuple) else value


def run_study(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Execute the runs of a study that have no record, or one of a failure; append their records.

    Prints the summary of the study, if it has one. Exits with status 2 for wrong arguments.

    Returns
    -------
    int
        Exit status: 0; 1 if workers of a cluster were lost; 130 if interrupted.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench {study.name}")
    parser.add_argument("--out", type=Path, required=True, help=f"records, *-{study.name}.jsonl")
    parser.add_argument("--resume", action="store_true", help="go on with a file that exists")
    parser.add_argument("--smoke", action="store_true", help="each kind of run at its smallest")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="limit of each run, in seconds; default: its own",
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--scheduler", help="solve on the workers of this Dask scheduler")
    parser.add_argument("--shard", metavar="I/N", help="every N-th run, from the I-th on")
    defaults = study.defaults()
    setting_names = ", ".join(defaults) or "there are none"
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"settings: {setting_names}",
    )
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.resume:
        parser.error(f"--out: {options.out} exists; --resume goes on with it")
    try:
        settings = defaults | dict(parse_setting(study, text) for text in options.set)
    except ValueError as error:
        parser.error(f"--set: {error}")
    try:
        shard_slice = shard(options.shard) if options.shard else slice(None)
    except PoetModelError as error:
        parser.error(f"--shard: {error}")
    missing = [name for name, value in settings.items() if value == REQUIRED]
    if missing and not options.smoke:
        parser.error(f"--set: {missing[0]}=VALUE is missing")
    settings["workers"] = options.workers
    try:
        runs = list(study.smoke_runs()) if options.smoke else study.select_runs(settings)
    except PoetModelError as error:
        parser.error(str(error))
    runs = [run for run in runs if options.only in run.name]
    if options.limit is not None:
        runs = [run.with_limit(options.limit) for run in runs]
    store = RecordFile(options.out, study.key_of)
    try:
        with open_executor(study, options) as (pool, max_runs):
            status = run_all(runs[shard_slice], study, store, pool, settings, max_runs)
            if status == 0 and study.summarize is not None:
                sys.stdout.write(f"{study.summarize(store.records())}\n")
            return status
    except WorkersLostError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except InputError as error:
        parser.error(str(error))


@contextmanager
def open_executor(
    study: Study, options: argparse.Namespace
) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Open the executor of a study; yield it, and a function that returns its number of workers."""
    if options.scheduler:
        from poetmodel.sweeps.cluster import connect

        grace_s = study.grace_s if study.has_own_process else None
        with connect(options.scheduler, grace_s) as executor_and_width:
            yield executor_and_width
        return
    is_in_this_process = options.smoke or not study.has_own_process
    with ThisProcess() if is_in_this_process else LocalProcesses(
        lambda fields, _: fields["limit_s"] + study.grace_s, preloaded=study.preloaded
    ) as executor:  # fmt: skip
        yield executor, lambda: options.workers


def run_all(
    runs: Sequence[Any],
    study: Study,
    store: RecordFile,
    executor: Executor,
    settings: Mapping[str, Any],
    max_runs: Callable[[], int],
) -> int:
    """Execute runs in order, and store their records; return 130 if interrupted, otherwise 0.

    Exceptions and ended processes are recorded as failures; runs of this process raise exceptions
    that are no errors of the package.
    """
    workers, start_times_s = settings["workers"], {}

    def inputs_of(run: Any) -> tuple[Any]:
        start_times_s[run.key] = time.monotonic()
        return (study.start_of(run, store, settings),)

    def failure(run: Any, error: BaseException) -> Record:
        if isinstance(executor, ThisProcess) and not isinstance(error, PoetModelError):
            raise error
        seconds = time.monotonic() - start_times_s[run.key]
        reason = f"{type(error).__name__}: {error}"
        facts = {"seconds": seconds, "status": FAILED, "reason": reason}
        return make_record(study.kind, run.name, cell=run.to_dict(), workers=workers, **facts)

    measure = study.measure
    if isinstance(executor, ShippingPool):  # workers import the function from their checkout
        folder = str(Path(__file__).resolve().parent)
        measure = ModuleFunction(folder, measure.__module__, measure.__qualname__)
    queue: RunQueue[Any] = RunQueue(
        store=store,
        runs=runs,
        measure=measure,
        failure=failure,
        inputs_of=inputs_of,
        on_progress=_print_progress,
        max_attempts=1,
    )
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        queue.execute(executor, max_runs)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; --resume goes on\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    return 0


def _print_progress(progress: Progress) -> None:
    if progress.last is None:
        return
    name, status = progress.last["name"], progress.last["status"]
    gap, seconds = progress.last.get("gap"), progress.last.get("seconds")
    result_text = status if gap is None else f"{status}, gap {gap:.3%}"
    time_text = "" if seconds is None else f" {seconds:.2f} s,"
    sys.stderr.write(f"{progress.done}/{progress.total} {name}:{time_text} {result_text}\n")
