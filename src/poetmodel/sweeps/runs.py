"""The runs of a sweep: one problem each, solved by one method."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.baselines.lookup import method as find_method
from poetmodel.baselines.own import hash_method_files, is_found_by_other_processes
from poetmodel.budgets import Budget
from poetmodel.case.case import Case
from poetmodel.device import Costs, Device
from poetmodel.errors import BackendError, InputError, UserMethodError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import DEFAULT_SHAPE, InputShape, Variant, read_model_or_file
from poetmodel.problem import USER_OBJECTIVE, Limits, Problem
from poetmodel.solver.request import SearchOptions
from poetmodel.user_files import hash_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from poetmodel.baselines.registry import Method
    from poetmodel.graph import Graph


CONSTRAINTS_PREFIX: Final = "user-defined constraints: "
"""Prefix of errors in user-defined constraints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Common settings of all runs of a sweep."""

    deadline_counts: str | None = None
    """The time that the deadline limits; None for the device's default."""
    time_limit_s: float = 60.0
    """Maximum wall time of a solve, including that of building the model [s]."""
    gap: float = 1e-4
    """Gap tolerance of a solve."""
    threads: int = 1
    """Threads of a solve."""
    seed: int = 0
    """Seed of a solve."""
    constraints: str | None = None
    """Text of a file of user-defined constraints; None without one."""
    commit: int | None = None
    """Number of steps from one commit of state to storage to the next; None without commits."""

    @classmethod
    def from_limits(
        cls, limits: Limits, search: SearchOptions, *, constraints: str | None = None
    ) -> Self:
        """Return the settings that limits and options of a search state."""
        return cls(
            deadline_counts=limits.deadline_counts,
            time_limit_s=search.time_limit_s,
            gap=search.gap,
            threads=search.threads,
            seed=search.seed,
            constraints=constraints,
            commit=limits.commit,
        )

    @property
    def limits(self) -> Limits:
        """The limits that the settings state."""
        return Limits(deadline_counts=self.deadline_counts, commit=self.commit)

    def search(self, method: str) -> SearchOptions:
        """Return the options of a search by a method, with the default solver."""
        return SearchOptions(
            method=method,
            time_limit_s=self.time_limit_s,
            gap=self.gap,
            threads=self.threads,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One problem, solved by one method."""

    model: str
    """A shipped model, or a graph or step file."""
    device: str
    """A shipped device, or a device file."""
    ram: str
    """RAM budget, in the format of ``--ram``."""
    batch: int | None = None
    """Samples of a step; None for the network's default."""
    image: int | None = None
    """Side of the square images of a step [pixels]; None for the network's default."""
    sequence: int | None = None
    """Tokens of a sample; None for the network's default."""
    state: str | None = None
    """Optimizer whose state is in the graph, in the format of ``--state``; None without state."""
    in_place: bool = False
    """Whether operators may overwrite their inputs."""
    tile: str | None = None
    """Maximum size of a slice of a weight, or of a tensor of a step file, in the format of
    ``--tile``; None for undivided tensors."""
    train: str | None = None
    """Trained layers, in the format of ``--train``; None for all."""
    deadline: str | None = None
    """Deadline, in the format of ``--deadline``; None without one."""
    method: str = "optimal"
    """Name of the method, or ``FILE.py:FUNCTION``."""
    backend: str | None = None
    """The solver, for methods that need one; None for other methods."""
    formulation: str | None = None
    """The formulation, for methods that need a solver; None for the default one and for other
    methods."""
    settings: Settings = Settings()
    """Settings that all runs of the sweep share."""
    inputs: str = ""
    """Hash of graph and device, then of the files of a user-defined method and of a user-defined
    back end; part of the key."""

    @property
    def key(self) -> str:
        """Key in the records of a sweep: a hash (20 hex digits) of `to_dict`."""
        text = json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def name(self) -> str:
        """Name in tables and messages: network, device, limits, method, solver and formulation."""
        texts = (self.network, self.device, self.ram, self.deadline, self.method, self.backend)
        return " | ".join(text for text in (*texts, self.formulation) if text)

    @property
    def shape(self) -> Variant:
        """Input sizes, state, in-place operators, tiles and trained layers of the network."""
        return Variant(**{field.name: getattr(self, field.name) for field in fields(Variant)})

    @property
    def network(self) -> str:
        """Name of the model in tables, with all settings of `shape` that are set."""
        return self.shape.label(self.model)

    @property
    def chain(self) -> Run:
        """The run without its budget, equal for all runs along one RAM axis."""
        return replace(self, ram="")

    @property
    def case(self) -> Case:
        """The run without its constraints, as a command line states it."""
        search = self.settings.search(self.method)
        if self.backend is not None:
            search = replace(search, backend=self.backend, formulation=self.formulation)
        return Case(
            source=self.model,
            shape=self.shape,
            device=self.device,
            limits=replace(self.settings.limits, ram=self.ram, deadline=self.deadline),
            search=search,
        )

    def build_problem(self) -> Problem:
        """Return the problem of the run.

        Raises
        ------
        InputError
            If model, shape, device, a limit or the user-defined constraints are invalid, or if the
            constraints contain an objective.
        """
        graph, device = load_graph(self.model, self.shape), load_device(self.device)
        limits = replace(self.case.limits, ram=self._budget())
        problem = Problem.from_limits(graph, Costs.estimate(graph, device), limits)
        if self.settings.constraints is None:
            return problem
        from poetmodel.problem.io import parse_constraints

        source = CONSTRAINTS_PREFIX.removesuffix(": ")
        constrained_problem = parse_constraints(self.settings.constraints, problem, source=source)
        if constrained_problem.minimize == USER_OBJECTIVE:
            raise InputError(f"{source}: objective: a sweep minimizes energy; leave it out")
        return constrained_problem

    def _budget(self) -> Budget:
        """Return the RAM budget; with tiles, a percentage is of the keep-all peak without tiles."""
        budget = Budget.parse(self.ram)
        if self.tile is None or budget.fraction is None:
            return budget
        keep_all_bytes = checkpoint_all_peak_bytes(
            load_graph(self.model, replace(self.shape, tile=None))
        )
        return budget.to_size(keep_all_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, without fields of `Variant` that are None, False or 0.

        `settings` is a dict, without `constraints` and `commit` if these are None, so that keys of
        older records stay valid.
        """
        default_fields = {field.name for field in fields(Variant)} - self.shape.overrides.keys()
        values = {name: value for name, value in asdict(self).items() if name not in default_fields}
        for name in ("constraints", "commit"):
            if getattr(self.settings, name) is None:
                del values["settings"][name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """Return the run of the values that `to_dict` returned."""
        return cls(**{**values, "settings": Settings(**values["settings"])})


def grid(
    models: Sequence[str],
    devices: Sequence[str],
    *,
    ram: Sequence[str],
    shapes: Sequence[InputShape] = (DEFAULT_SHAPE,),
    deadlines: Sequence[str | None] = (None,),
    methods: Sequence[str] = ("optimal",),
    backends: Sequence[str] = ("highs",),
    formulations: Sequence[str | None] = (None,),
    settings: Settings | None = None,
) -> tuple[Run, ...]:
    """Return all runs of a sweep: models x shapes x devices x deadlines x methods x budgets.

    Shapes are sizes of the models' inputs, or `Variant`s with further settings. Budgets ascend in
    bytes and vary fastest, back ends second fastest; formulations vary slowest. Back ends and
    formulations (None for the default) multiply only the methods that need a solver. Other methods
    have runs only if None is among the formulations. Duplicate runs are removed.

    Raises
    ------
    InputError
        If a model, shape, device, method, limit or the settings' constraints are invalid; the error
        lists all of these faults.
    """
    faults: dict[str, None] = {}
    methods_by_name: dict[str, Method] = {}
    for name in methods:
        try:
            methods_by_name[name] = _find_shareable_method(name)
        except (InputError, UserMethodError) as error:
            faults.update(dict.fromkeys(getattr(error, "faults", (str(error),))))
    for name in backends:
        try:
            _check_shareable_backend(name)
        except (InputError, BackendError) as error:
            faults.update(dict.fromkeys(getattr(error, "faults", (str(error),))))
    runs_by_problem = []
    for model, shape, device, deadline in product(models, shapes, devices, deadlines):
        budgets_and_runs = []
        for budget in ram:
            try:
                run = Run(
                    model=model,
                    device=device,
                    ram=budget,
                    **asdict(shape),
                    deadline=deadline,
                    settings=settings or Settings(),
                    inputs=_fingerprint(model, shape, device),
                )
                budgets_and_runs.append((run.build_problem().ram_budget_bytes, run))
            except InputError as error:
                faults.update(dict.fromkeys(error.faults))
        runs_by_problem.append(
            [run for _, run in sorted(budgets_and_runs, key=lambda pair: pair[0])]
        )
    if faults:
        raise InputError(faults)
    combinations = (
        replace(
            run,
            method=name,
            backend=backend,
            formulation=formulation,
            inputs=run.inputs + hash_method_files(found_method) + _hash_backend_files(backend),
        )
        for formulation, runs, (name, found_method) in product(
            formulations, runs_by_problem, methods_by_name.items()
        )
        if found_method.uses_solver or formulation is None
        for backend in (backends if found_method.uses_solver else (None,))
        for run in runs
    )
    return tuple(dict.fromkeys(combinations))


def _find_shareable_method(name: str) -> Method:
    """Return a method by its name; refuse one that is registered in this process only."""
    found_method = find_method(name)
    if found_method.user_function is not None and not is_found_by_other_processes(name):
        raise InputError(
            f"method {name!r}: it is registered in this process only, and a sweep uses other "
            "processes; name it FILE.py:FUNCTION"
        )
    return found_method


def _check_shareable_backend(name: str) -> None:
    """Raise `InputError` for an unknown back end, or one of this process only."""
    solver = backend_class(name)
    if name in backend_names() and not solver.__module__.startswith("poetmodel."):
        raise InputError(
            f"backend {name!r}: it is registered in this process only, and a sweep uses other "
            "processes; name it FILE.py:CLASS"
        )


def _hash_backend_files(name: str | None) -> str:
    """Return the hash of the files of ``FILE.py:CLASS``; "" for a shipped back end or None."""
    return "" if name is None or name in backend_names() else hash_files(backend_class(name))


@cache
def load_graph(model: str, shape: InputShape = DEFAULT_SHAPE) -> Graph:
    """Return the graph of a model or file; a file that changes later is not read again."""
    if model.endswith(".step.json") and shape.overrides.keys() == {"tile"}:
        from poetmodel.lowered.io import load_step
        from poetmodel.tiling.choice import divide_step

        return divide_step(load_step(model), shape.overrides["tile"]).graph
    return read_model_or_file(model, shape)


@cache
def load_device(device: str) -> Device:
    """Return a device by its name or file; a file that changes later is not read again."""
    return Device.load(device)


@cache
def _fingerprint(model: str, shape: InputShape, device: str) -> str:
    """Return a hash (16 hex digits) of the graph of a model, and of all fields of a device."""
    # The text lists all fields, as older records did: the repr of a device may change.
    loaded_device = load_device(device)
    device_fields = ", ".join(
        f"{field.name}={getattr(loaded_device, field.name)!r}" for field in fields(loaded_device)
    )
    text = f"{load_graph(model, shape).sha256} Device({device_fields})"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
