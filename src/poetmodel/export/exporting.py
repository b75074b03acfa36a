"""Export: solve a step for a device, plan it, assign offsets, and write a folder of C."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Unpack

from poetmodel.budgets import Budget, TileChoice
from poetmodel.case.solving import LoadedCase, Placing, Remainder, Stages, solve_case
from poetmodel.device import Costs, StorageMode
from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import BudgetError, InputError, join_names
from poetmodel.export.checks import check_flash, make_ram_error, min_weight_bytes
from poetmodel.export.deployment import Build, Deployment
from poetmodel.export.flash import make_smallest_program, make_zero_arena
from poetmodel.export.folder import write_folder
from poetmodel.export.migration import match_state
from poetmodel.export.options import ExportKeywords, ExportOptions
from poetmodel.export.replay import create_replay, order_outputs
from poetmodel.export.reserves import reserved_bytes
from poetmodel.export.storage import Program, StorageLayout
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.identity import step_identity
from poetmodel.lowered.step import with_stored_state
from poetmodel.lowered.tables import with_byte_inputs
from poetmodel.lowered.values import check_values
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.planner import make_plan
from poetmodel.tiling.choice import choose_tiles, needed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poetmodel.device import Device
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import Request
    from poetmodel.solver.tile_trials import ChosenTiles

STEP_RATIO: Final = 0.9
"""Maximum fraction of the remaining time for the solve of the step.

The rest is for checks and forward passes."""
TRIAL_FLASH_RATIO: Final = 0.95
"""Maximum fraction of the flash for the program of a trial's schedule, because the program of the
final schedule may need more code."""


def export_step(
    step: LoweredStep,
    folder: str | Path,
    *,
    infer: bool = False,
    evaluate: bool = False,
    **keywords: Unpack[ExportKeywords],
) -> Deployment:
    """Write a folder of C that executes a training step within the RAM of a device.

    The options, `infer` and `evaluate` included, are those of `ExportOptions.parse`.

    Raises
    ------
    InputError
        If an option or a value of the step is invalid, or a file cannot be written.
    BudgetError, FlashError
        If RAM, storage, the stack or the flash of the device is too small.
    NoScheduleError
        If no schedule meets the limits, or none was found in time.
    """
    options = ExportOptions.parse(folder, infer=infer, evaluate=evaluate, **keywords)
    return export_with(step, options)


def export_with(step: LoweredStep, options: ExportOptions) -> Deployment:
    """Write a folder of C for valid options; the time limit begins now. See `export_step`."""
    request = options.request
    step = _prepare(step, options)
    trial = Trial(step, options)
    trial.check_least_weights()
    answer = solve_case(
        trial.load_case(),
        request,
        placing=trial.placing(
            available_bytes=options.device.ram_bytes - trial.reserved_bytes, time_ratio=STEP_RATIO
        ),
        stages=trial,
    )
    planned = answer.require_plan()
    plan, arena, problem = planned.plan, planned.require_arena(), planned.problem
    tiles = trial.tiles
    step = tiles.step
    replay = _make_replay(step, options)
    replay = replay and order_outputs(replay, step, plan)
    layout = StorageLayout(
        options=options,
        identity=trial.identity,
        programs=(Program(kind="step", step=step, plan=plan, arena=arena),),
        ram_bytes=trial.ram_bytes,
        replay=replay,
        migration=None
        if options.migration_source is None
        else match_state(step, options.migration_source, replay),
    )
    _check_migration(layout)
    passes = (
        _plan_forward_pass(kind, layout, forward_pass, trial, problem, request)
        for kind, forward_pass in (("inference", step.inference), ("evaluation", step.evaluation))
        if forward_pass is not None
    )
    for program in passes:
        layout = replace(layout, programs=(*layout.programs, program))
    _check_stored_bytes(layout)
    build = Build.from_layout(layout)
    check_flash(build)
    deployment = Deployment(
        **build.field_values(),
        result=answer.result,
        tile_bytes=tiles.tile_bytes,
        tile_trials=() if tiles.tile_bytes is None else tiles.trials,
    )
    write_folder(deployment)
    return deployment


def _prepare(step: LoweredStep, options: ExportOptions) -> LoweredStep:
    """Return a step with byte inputs and only requested forward passes; check for finite values."""
    for option, is_requested, forward_pass_step in (
        ("infer", options.infer, step.inference),
        ("evaluate", options.evaluate, step.evaluation),
    ):
        if is_requested and forward_pass_step is None:
            raise InputError(
                f"{option}: {step.graph.name} was captured without its forward pass in evaluation "
                f"mode; capture it again, with {option}"
            )
    step = replace(
        step,
        inference=step.inference if options.infer else None,
        evaluation=step.evaluation if options.evaluate else None,
    )
    check_values(step)
    return with_byte_inputs(step, options.byte_inputs)


class Trial(Stages):
    """A step to export with the RAM that it may use; its tiles and its schedule are not known."""

    tiles: ChosenTiles
    """The chosen tile size; set by `settle`."""

    def __init__(self, step: LoweredStep, options: ExportOptions) -> None:
        self.step, self.options = step, options
        self.identity = step_identity(step)
        replay = _make_replay(step, options)
        self.reserved_bytes = reserved_bytes(step, options.stack_bytes, replay)
        self.ram_bytes = _total_ram_bytes(step, options, self.reserved_bytes)
        self.budget_bytes = self.ram_bytes - self.reserved_bytes
        """RAM limit of tensors and workspaces [B]."""
        self.case = options.case(step, ram_bytes=max(1, self.budget_bytes))
        self.may_page = self.case.limits.paging
        storage = options.device.storage
        self.mode = StorageMode.BLOCKING if storage is None else storage.mode

    def load_case(self) -> LoadedCase:
        """Return the case of the step, without the later tile sizes that exceed the flash."""
        loaded = LoadedCase.read(self.case)
        if self.options.device.flash is None or loaded.tiles is None:
            return loaded
        first, *later = loaded.tiles.candidates
        smallest = ((tile_bytes, make_smallest_program(step)) for tile_bytes, step in later)
        candidates = [
            first,
            *(
                (tile_bytes, program.step)
                for tile_bytes, program in smallest
                if self._build(program).flash_map()["free"] >= 0
            ),
        ]
        return replace(loaded, tiles=replace(loaded.tiles, candidates=candidates))

    def placing(self, *, available_bytes: int | None = None, time_ratio: float = 1.0) -> Placing:
        """Return how tensors get addresses in exported C."""
        return Placing(
            mode=self.mode,
            alignment=device_alignment(self.options.device),
            available_bytes=available_bytes,
            time_ratio=time_ratio,
        )

    def check_least_weights(self) -> None:
        """Raise `FlashError` if the weights alone exceed the flash: no tiles reduce those not 0."""
        flash = self.options.device.flash
        if flash is not None and min_weight_bytes(self.step) > flash.size_bytes:
            self.check_least_flash(self.step)

    def check_least_flash(self, step: LoweredStep) -> None:
        """Raise `FlashError` if the smallest program of the step in tiles exceeds the flash."""
        if self.options.device.flash is not None:
            check_flash(self._build(make_smallest_program(step)), are_lower_bounds=True)

    def _build(self, program: Program) -> Build:
        """Return the C of a program of the step in tiles, to size it."""
        layout = StorageLayout(
            options=self.options,
            identity=self.identity,
            programs=(program,),
            ram_bytes=self.ram_bytes,
            replay=_make_replay(program.step, self.options),
            migration=None,
        )
        return Build.from_layout(layout)

    def excess_bytes(self, step: LoweredStep, result: SolveResult) -> int:
        """Return the bytes by which a program exceeds `TRIAL_FLASH_RATIO` of the flash."""
        device = self.options.device
        if device.flash is None:
            return 0
        costs, schedule = result.problem.costs, result.require_schedule()
        plan = make_plan(step.graph, costs, schedule, mode=self.mode)
        program = Program(kind="step", step=step, plan=plan, arena=make_zero_arena(step, plan))
        min_free_bytes = int((1 - TRIAL_FLASH_RATIO) * device.flash.size_bytes)
        return max(0, min_free_bytes - self._build(program).flash_map()["free"])

    def settle(self, remainder: Remainder) -> Remainder:
        """Raise an error if flash, RAM or storage is too small for the step in tiles."""
        problem = remainder.problem
        self.tiles = remainder.require_tiles()
        self.check_least_flash(self.tiles.step)
        self._check_min_ram(self.tiles)
        if problem.table.commit is not None:
            _check_storage(
                2 * problem.table.commit.generation_bytes,
                self.options.device,
                content="two generations of state there take",
                commit=True,
            )
        return remainder

    def _check_min_ram(self, tiles: ChosenTiles) -> None:
        """Raise `BudgetError` if a node needs more RAM than tensors may use."""
        device = self.options.device
        min_bytes = needed_bytes(tiles.step, device, paging=self.may_page)
        if min_bytes > self.budget_bytes:
            raise make_ram_error(
                tiles.step,
                device,
                ram_bytes=self.ram_bytes,
                reserved_bytes=self.reserved_bytes,
                needed_bytes=min_bytes,
                tile_bytes=tiles.tile_bytes,
                paging=self.may_page,
                hints=self._ram_hints(min_bytes),
            )

    def _ram_hints(self, min_bytes: int) -> Iterator[str]:
        """Yield options with which the step fits the RAM of the device and needs less.

        `min_bytes` is the minimum RAM for tensors with the given options.
        """
        tile, device = self.options.tile, self.options.device
        paging = self.options.limits.paging

        def choose_tile(tile_choice: TileChoice, *, paging: bool) -> tuple[int | None, int]:
            size, step = choose_tiles(
                self.step, tile_choice, device, ram_bytes=self.budget_bytes, paging=paging
            )
            return size, needed_bytes(step, device, paging=paging)

        most_bytes = min(min_bytes - 1, device.ram_bytes - self.reserved_bytes)
        if not tile.is_auto:
            size, tiled_bytes = choose_tile(TileChoice.AUTO, paging=paging)
            if tiled_bytes <= most_bytes:
                auto_choice = TileChoice(size_bytes=size)
                yield (
                    f"take tile {auto_choice}, with which it needs "
                    f"{tiled_bytes + self.reserved_bytes:,} B in all"
                )
        if not paging and device.storage is not None:
            _, paged_bytes = choose_tile(tile, paging=True)
            if paged_bytes <= most_bytes:
                needed = paged_bytes + self.reserved_bytes
                yield f"allow paging, with which it needs {needed:,} B in all"


def _make_replay(step: LoweredStep, options: ExportOptions) -> Replay | None:
    """Return the storage for samples, None if there are none; needs an optimizer and a front."""
    device = options.device
    if not options.samples:
        return None
    if device.is_volatile and not options.commit:
        raise InputError(
            f"replay: the storage of {device.name} is volatile and cannot retain samples; commit "
            "to its flash, which then holds samples, too"
        )
    layout = GenerationLayout.for_device(device)
    return create_replay(step, options.samples, layout, cut=options.replay_cut)


def _check_migration(layout: StorageLayout) -> None:
    """Raise `InputError` if a step that migrates has state in no generation.

    ``pm_migrate`` would write it to its own slot, where the state of the other step may be.
    """
    graph = layout.step.graph
    names = {graph.tensors[i].name for i in graph.state_tensors} - {*layout.generation_names}
    if layout.migration is not None and names:
        raise InputError(
            f"migrate_from: no step replaces {join_names(sorted(names))}, so that it is in no "
            "generation, and a power cut while it is written could destroy the earlier state; "
            "train it, or make it a constant"
        )


def _plan_forward_pass(
    kind: str,
    layout: StorageLayout,
    captured_step: LoweredStep,
    trial: Trial,
    problem: Problem,
    request: Request,
) -> Program:
    """Solve, plan and place a forward pass, `captured_step`, in the RAM behind the state in RAM.

    Limits are those of `problem`, the step's, but its deadline does not apply, its resident state
    takes RAM, and the `min_stored_bytes` of `layout` are not available. Costs are estimates.
    """
    resident_bytes, device = layout.resident_bytes, layout.device
    is_mapped = layout.plan.memory_mapped
    graph = layout.step.graph
    stored_names = {graph.tensors[i].name for i in graph.state_tensors} - layout.resident_names
    step = with_stored_state(captured_step, () if is_mapped else stored_names)
    min_bytes = floor(align_sizes(step.graph, device_alignment(device))).bytes
    free_bytes = problem.usable_ram_bytes - resident_bytes
    if free_bytes < min_bytes:
        missing_bytes = min_bytes - free_bytes
        has_more_ram = layout.ram_bytes + missing_bytes <= device.ram_bytes
        hint = f"give {missing_bytes:,} B more, or " if has_more_ram else ""
        raise BudgetError(
            f"ram: state in RAM leaves {max(0, free_bytes):,} B for an {kind}, and one node of it "
            f"needs {min_bytes:,} B; {hint}leave {_OPTION_OF_PASS[kind]} out"
        )
    aux = problem.aux_limit_bytes
    pass_problem = replace(
        problem,
        graph=step.graph,
        costs=Costs.estimate(step.graph, device),
        ram=free_bytes,
        deadline=None,
        aux_bytes=None if aux is None else max(0, aux - layout.min_stored_bytes),
    )
    loaded = LoadedCase(case=trial.case, problem=pass_problem)
    planned = solve_case(loaded, request, placing=trial.placing()).require_plan()
    return Program(
        kind=kind,
        step=step,
        plan=planned.plan,
        arena=planned.require_arena(),
        base_bytes=resident_bytes,
    )


_OPTION_OF_PASS: Final = {"inference": "infer", "evaluation": "evaluate"}
"""The option of `export_step` for each kind of forward pass."""


def _check_stored_bytes(layout: StorageLayout) -> None:
    """Raise `BudgetError` if pages, generations or samples do not fit the storage of a device.

    At most two groups of `generations_per_block` generations count. If commits copy state to flash,
    generations and samples must fit the flash. Storage of unknown size is not checked.
    """
    device = layout.device
    stores_samples, copies_to_flash = layout.replay is not None, layout.copies_to_flash
    _check_storage(
        layout.min_stored_bytes,
        device,
        commit=bool(layout.rotating_state),
        has_more_ram=layout.ram_bytes < device.ram_bytes,
        stores_samples=stores_samples and not copies_to_flash,
    )
    if copies_to_flash:
        _check_storage(
            layout.min_saved_bytes,
            device,
            content="generations of state and samples there take",
            commit=True,
            stores_samples=stores_samples,
        )


def _check_storage(
    stored_bytes: int,
    device: Device,
    *,
    content: str = "data stored there take",
    commit: bool,
    has_more_ram: bool = False,
    stores_samples: bool = False,
) -> None:
    """Raise `BudgetError` if `stored_bytes` exceed the storage of a device.

    With `commit`, flash for state replaces volatile storage. Storage of unknown size is not
    checked. `content` is the subject and the verb of the message; flags select its advice.
    """
    flash = device.flash if commit and device.is_volatile else None
    capacity_bytes = device.aux_bytes if flash is None else flash.storage_bytes
    if capacity_bytes is None or stored_bytes <= capacity_bytes:
        return
    blocks = ""
    advice = "give more ram" if has_more_ram else "take a smaller network or another device"
    if commit:
        advice = "train fewer parameters, or leave commit out"
    if stores_samples:
        advice = f"store fewer samples, {advice}"
    if commit or not device.is_volatile:
        blocks = f" in blocks of {GenerationLayout.for_device(device).erase_block_bytes:,} B"
    raise BudgetError(
        f"{'storage' if flash is None else 'flash'}: {content} {stored_bytes:,} B{blocks}, and "
        f"device {device.name} has {capacity_bytes:,} B; {advice}"
    )


def _total_ram_bytes(step: LoweredStep, options: ExportOptions, reserved_ram_bytes: int) -> int:
    """Return the RAM limit of a step without tiles [B]; by default the RAM of the device.

    A percentage excludes `reserved_ram_bytes` (RAM outside of the arena), the result includes them.
    A budget of 100 % is increased to the keep-all peak of aligned tensors.
    """
    if options.limits.ram is None:
        return options.device.ram_bytes
    budget = Budget.parse(options.limits.ram)
    tensor_bytes = budget.tensor_bytes(
        checkpoint_all_peak_bytes(step.graph), reserved_bytes=reserved_ram_bytes
    )
    if budget.keeps_all:
        aligned_graph = align_sizes(step.graph, device_alignment(options.device))
        tensor_bytes = max(tensor_bytes, checkpoint_all_peak_bytes(aligned_graph))
    return tensor_bytes + reserved_ram_bytes
