"""Export: solve a step for a device, plan it, assign offsets, and write a folder of C."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from poetmodel.budgets import Budget, TileChoice
from poetmodel.device import Costs, StorageMode
from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import BudgetError, InputError, VerificationError, join_names
from poetmodel.export.checks import make_ram_error, min_weight_bytes
from poetmodel.export.deployment import (
    Deployment,
    ForwardPass,
    reserved_bytes,
)
from poetmodel.export.flash import (
    check_flash,
    make_smallest_program,
    make_zero_arena,
    program_sizes,
)
from poetmodel.export.folder import write_folder
from poetmodel.export.migration import load_generation_layout, match_state
from poetmodel.export.options import ExportKeywords, ExportOptions
from poetmodel.export.replay import create_replay, order_outputs
from poetmodel.export.source import StepSource
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.codes import fuse_byte_quantization
from poetmodel.lowered.identity import step_identity
from poetmodel.lowered.step import Weights, with_stored_state
from poetmodel.lowered.tables import with_byte_inputs
from poetmodel.lowered.values import check_values
from poetmodel.plan import check_plan
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.plan.arena_check import check_arena
from poetmodel.planner import make_plan
from poetmodel.solver.fitting import fit_arena
from poetmodel.solver.tile_trials import find_cheapest_tiles
from poetmodel.tiling.choice import candidate_tiles, choose_tiles, needed_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.device import Device
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request

STEP_RATIO: Final = 0.9
"""Maximum fraction of the remaining time for the solve of the step.

The rest is for checks and forward passes."""
TRIAL_FLASH_RATIO: Final = 0.95
"""Maximum fraction of the flash for the program of a trial's schedule, because the program of the
final schedule may need more code."""
INTERRUPTED_RATIO: Final = 0.1
"""Maximum fraction of the remaining time for the solve after Ctrl-C or the progress callback ended
the trials of tiles: this solve only has to plan the schedule that the trials found."""


def export_step(
    step: LoweredStep,
    folder: Path,
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
    request, board = options.request, options.device
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
    step = fuse_byte_quantization(with_byte_inputs(step, options.byte_inputs))
    source = _load_migration_source(options)
    make_replay = partial(_make_replay, options=options)
    sample_storage = make_replay(step)
    identity = step_identity(step)
    reserved_ram_bytes = reserved_bytes(step, options.stack_bytes, sample_storage)
    ram_bytes = _total_ram_bytes(step, options, reserved_ram_bytes)
    may_page = options.limits.paging and options.costs(step.graph).pages is not None
    budget_bytes = ram_bytes - reserved_ram_bytes
    undivided_step, initial_weights = step, Weights.from_step(step)
    smallest_plan, zero_offsets = make_smallest_program(step)
    deployment = Deployment(
        step=step,
        identity=identity,
        plan=smallest_plan,
        arena=zero_offsets,
        ram_bytes=ram_bytes,
        stack_bytes=options.stack_bytes,
        device=board,
        commit=options.commit and bool(step.graph.replacement_of),
        commit_every=options.commit_every,
        checksum=options.checksum,
        replay=sample_storage,
        prefix=options.prefix,
        weights=options.weights,
        shared_kernels=None
        if options.shared_kernels is None
        else Path(os.path.relpath(options.shared_kernels, options.folder)).as_posix(),
    )
    if board.flash is not None and min_weight_bytes(step) > board.flash.size_bytes:
        # No division into tiles reduces the weights that are not 0.
        check_flash(_with_program_bytes(deployment, initial_weights), are_lower_bounds=True)

    make_problem = partial(options.build_problem, ram_bytes=budget_bytes, paging=may_page)
    deploy_tiles = partial(_deploy_tiles, deployment, make_replay=make_replay)
    candidates = candidate_tiles(
        step,
        options.tile,
        board,
        ram_bytes=budget_bytes,
        paging=may_page,
        names_nodes=options.profile is not None,
    )
    chosen_tiles = find_cheapest_tiles(
        _drop_oversized_steps(candidates, deploy_tiles),
        make_problem,
        request,
        excess_bytes=partial(_excess_flash_bytes, board, deploy_tiles),
    )
    tile_bytes, step = chosen_tiles.tile_bytes, chosen_tiles.step
    if tile_bytes is not None:
        initial_weights = Weights.from_step(step)
        deployment = replace(deploy_tiles(tile_bytes, step), tile_trials=chosen_tiles.trials)
        sample_storage = deployment.replay
    check_flash(_with_program_bytes(deployment, initial_weights), are_lower_bounds=True)
    min_bytes = needed_bytes(step, board, paging=may_page)
    if min_bytes > budget_bytes:
        hints = _ram_hints(
            undivided_step,
            options.tile,
            board,
            min_bytes=min_bytes,
            ram_bytes=ram_bytes,
            reserved_ram_bytes=reserved_ram_bytes,
            paging=options.limits.paging,
        )
        raise make_ram_error(
            step,
            board,
            ram_bytes=ram_bytes,
            reserved_bytes=reserved_ram_bytes,
            needed_bytes=min_bytes,
            tile_bytes=tile_bytes,
            paging=may_page,
            hints=hints,
        )
    problem = make_problem(step)
    if problem.table.commit is not None:
        _check_storage(
            2 * problem.table.commit.generation_bytes,
            board,
            content="two generations of state there take",
            commit=True,
        )
    available_bytes = board.ram_bytes - reserved_ram_bytes
    result, plan, arena = _solve_and_place(
        problem,
        board,
        request,
        INTERRUPTED_RATIO if chosen_tiles.is_interrupted else STEP_RATIO,
        available_bytes=available_bytes,
        start=None if chosen_tiles.result is None else chosen_tiles.result.schedule,
    )
    sample_storage = sample_storage and order_outputs(sample_storage, step, plan)
    migration = None if source is None else match_state(step, source, sample_storage)
    deployment = replace(
        deployment,
        plan=plan,
        arena=arena,
        result=result,
        replay=sample_storage,
        migration=migration,
    )
    _check_migration(deployment)
    if step.inference is not None:
        forward_pass = _plan_forward_pass(
            "inference", deployment, step.inference, problem, board, request
        )
        deployment = replace(deployment, inference=forward_pass)
    if step.evaluation is not None:
        forward_pass = _plan_forward_pass(
            "evaluation", deployment, step.evaluation, problem, board, request
        )
        deployment = replace(deployment, evaluation=forward_pass)
    _check_stored_bytes(deployment, board)
    program = StepSource(deployment, initial_weights)
    deployment = replace(deployment, program_bytes=program_sizes(deployment, program))
    check_flash(deployment)
    write_folder(program.with_deployment(deployment), options.folder, command=options.command)
    return deployment


def _make_replay(step: LoweredStep, options: ExportOptions) -> Replay | None:
    """Return the storage for samples of a step, if any; it needs an optimizer and a front."""
    device = options.device
    if not options.samples:
        return None
    if device.is_volatile and not options.commit:
        raise InputError(
            f"replay: the storage of {device.name} is volatile and cannot retain samples; commit "
            "to its flash, which then holds samples, too"
        )
    return create_replay(step, options.samples, GenerationLayout.for_device(device))


def _load_migration_source(options: ExportOptions) -> dict[str, Any] | None:
    """Load the layout of the generations in the folder of `migrate_from`, if there is one."""
    if options.migrate_from is None:
        return None
    source = load_generation_layout(options.migrate_from)
    if not options.commit or options.device.is_volatile or source["in_flash"]:
        raise InputError(
            "migrate_from: expected commits to the storage of the device, of both folders; give "
            "commit, or copy state by name if storage is volatile"
        )
    return source


def _check_migration(deployment: Deployment) -> None:
    """Raise `InputError` if a step that migrates has state on storage that is in no generation."""
    graph = deployment.step.graph
    names = {graph.tensors[i].name for i in graph.state_tensors} - {*deployment.generation_names}
    stored_names = names - deployment.resident_names
    if deployment.migration is not None and stored_names:
        raise InputError(
            f"migrate_from: {join_names(sorted(stored_names))} is on storage, and no step "
            "replaces it, so that it is in no generation; give more ram"
        )


def _deploy_tiles(
    deployment: Deployment,
    tile_bytes: int | None,
    step: LoweredStep,
    *,
    make_replay: Callable[[LoweredStep], Replay | None],
) -> Deployment:
    """Return a copy of `deployment` with a step in tiles of `tile_bytes`."""
    plan, arena = make_smallest_program(step)
    new_deployment = replace(deployment, step=step, tile_bytes=tile_bytes, replay=make_replay(step))
    return replace(new_deployment, plan=plan, arena=arena)


def _drop_oversized_steps(
    candidates: list[tuple[int | None, LoweredStep]],
    deploy_tiles: Callable[[int | None, LoweredStep], Deployment],
) -> list[tuple[int | None, LoweredStep]]:
    """Return the first (tile size [B], step), and later pairs whose program may fit the flash."""
    first_candidate, *later_candidates = candidates
    return [
        first_candidate,
        *(
            candidate
            for candidate in later_candidates
            if _free_flash_bytes(deploy_tiles(*candidate)) >= 0
        ),
    ]


def _excess_flash_bytes(
    device: Device,
    deploy_tiles: Callable[[int | None, LoweredStep], Deployment],
    step: LoweredStep,
    result: SolveResult,
) -> int:
    """Return the bytes by which a program exceeds `TRIAL_FLASH_RATIO` of the flash."""
    if device.flash is None:
        return 0
    mode, schedule = _transfer_mode(device), result.require_schedule()
    plan = make_plan(step.graph, result.problem.costs, schedule, mode=mode)
    arena = make_zero_arena(step, plan)
    deployment = replace(deploy_tiles(None, step), plan=plan, arena=arena, result=result)
    min_free_bytes = int((1 - TRIAL_FLASH_RATIO) * device.flash.size_bytes)
    return max(0, min_free_bytes - _free_flash_bytes(deployment))


def _free_flash_bytes(deployment: Deployment) -> int:
    """Return the flash that a program leaves [B]: negative if it does not fit, 0 if unknown."""
    weights = Weights.from_step(deployment.step)
    return _with_program_bytes(deployment, weights).flash_map().get("free", 0)


def _transfer_mode(device: Device) -> StorageMode:
    return StorageMode.BLOCKING if device.storage is None else device.storage.mode


def _with_program_bytes(deployment: Deployment, weights: Weights) -> Deployment:
    """Return a deployment with its flash usage by code, constants and initial weights."""
    source = StepSource(deployment, weights)
    return replace(deployment, program_bytes=program_sizes(deployment, source))


def _solve_and_place(
    problem: Problem,
    device: Device,
    request: Request,
    ratio: float = 1.0,
    *,
    available_bytes: int | None = None,
    start: Schedule | None = None,
) -> tuple[SolveResult, Plan, Arena]:
    """Solve a problem, and return (result, plan, arena), which are all verified.

    Uses at most the fraction `ratio` of the remaining time. The message of a failure recommends at
    most `available_bytes` of RAM for tensors [B]; None is the default of `fit_arena`.
    """
    limit_s = max(ratio * request.remaining_s(), 1e-3)
    result, plan, arena = fit_arena(
        problem,
        mode=_transfer_mode(device),
        alignment=device_alignment(device),
        time_limit=limit_s,
        gap=request.gap,
        on_progress=request.on_progress,
        available_bytes=available_bytes,
        start=start,
    )
    result.require_schedule()
    if plan is None or arena is None:
        raise VerificationError(result.violations)
    checks = (
        check_plan(problem.graph, problem.costs, plan).violations,
        check_arena(problem.graph, plan, arena).violations,
    )
    if any(checks):
        raise VerificationError([violation for check in checks for violation in check])
    return result, plan, arena


def _plan_forward_pass(
    kind: str,
    deployment: Deployment,
    captured_step: LoweredStep,
    problem: Problem,
    device: Device,
    request: Request,
) -> ForwardPass:
    """Solve, plan and place a forward pass, `captured_step`, in the RAM behind the state in RAM.

    Limits are those of `problem`, the step's, but its deadline does not apply, its resident state
    takes RAM, and the `min_stored_bytes` of `deployment` are not available. Costs are estimates.
    """
    resident_bytes = deployment.resident_bytes
    is_mapped = deployment.plan.memory_mapped
    graph, resident = deployment.step.graph, deployment.plan.resident or ()
    stored_names = {graph.tensors[i].name for i in graph.state_tensors if i not in resident}
    step = with_stored_state(captured_step, () if is_mapped else stored_names)
    min_bytes = floor(align_sizes(step.graph, device_alignment(device))).bytes
    free_bytes = problem.usable_ram_bytes - resident_bytes
    if free_bytes < min_bytes:
        missing_bytes = min_bytes - free_bytes
        has_more_ram = deployment.ram_bytes + missing_bytes <= device.ram_bytes
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
        aux_bytes=None if aux is None else max(0, aux - deployment.min_stored_bytes),
    )
    _, plan, arena = _solve_and_place(pass_problem, device, request)
    return ForwardPass(kind=kind, step=step, plan=plan, arena=arena)


_OPTION_OF_PASS: Final = {"inference": "infer", "evaluation": "evaluate"}
"""The option of `export_step` for each kind of forward pass."""


def _check_stored_bytes(deployment: Deployment, device: Device) -> None:
    """Raise `BudgetError` if pages, generations or samples do not fit the storage of a device.

    At most two groups of `generations_per_block` generations count. If commits copy state to flash,
    generations and samples must fit the flash. Storage of unknown size is not checked.
    """
    stores_samples, copies_to_flash = deployment.replay is not None, deployment.copies_to_flash
    _check_storage(
        deployment.min_stored_bytes,
        device,
        commit=bool(deployment.rotating_state),
        has_more_ram=deployment.ram_bytes < device.ram_bytes,
        stores_samples=stores_samples and not copies_to_flash,
    )
    if copies_to_flash:
        _check_storage(
            deployment.saved_bytes,
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


def _ram_hints(
    undivided_step: LoweredStep,
    tile_choice: TileChoice,
    device: Device,
    *,
    min_bytes: int,
    ram_bytes: int,
    reserved_ram_bytes: int,
    paging: bool,
) -> Iterator[str]:
    """Yield hints for options of `export_step` with which the step fits the RAM of the device.

    An option with which the step fits has no hint unless it also reduces `min_bytes`, the minimum
    RAM for tensors with the given options [B]. Automatic tiles are chosen for the limit `ram_bytes`
    [B].
    """

    def choose_tile(tile_choice: TileChoice, *, paging: bool) -> tuple[int | None, int]:
        budget_bytes = ram_bytes - reserved_ram_bytes
        size, step = choose_tiles(
            undivided_step, tile_choice, device, ram_bytes=budget_bytes, paging=paging
        )
        return size, needed_bytes(step, device, paging=paging)

    device_bytes = device.ram_bytes - reserved_ram_bytes
    if not tile_choice.is_auto:
        size, tiled_bytes = choose_tile(TileChoice.AUTO, paging=paging)
        if tiled_bytes < min_bytes and tiled_bytes <= device_bytes:
            auto_choice = TileChoice(size_bytes=size)
            yield (
                f"take tile {auto_choice}, with which it needs "
                f"{tiled_bytes + reserved_ram_bytes:,} B in all"
            )
    if not paging and device.storage is not None:
        _, paged_bytes = choose_tile(tile_choice, paging=True)
        if paged_bytes < min_bytes and paged_bytes <= device_bytes:
            yield f"allow paging, with which it needs {paged_bytes + reserved_ram_bytes:,} B in all"
