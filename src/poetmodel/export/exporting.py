"""Export: a step is solved for a device, planned, placed, and written as a folder of C."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from poetmodel.budgets import Budget, TileChoice
from poetmodel.device import Costs, StorageMode
from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import BudgetError, FlashError, InputError, VerificationError, listed
from poetmodel.export.checks import check_options, check_ram, min_weight_bytes, ram_error
from poetmodel.export.codes import fuse_byte_quantization
from poetmodel.export.deployment import (
    Deployment,
    ForwardPass,
    WeightsFormat,
    reserved_bytes,
    stack_bytes,
)
from poetmodel.export.flash import check_flash, program_sizes, smallest_program
from poetmodel.export.folder import write_folder
from poetmodel.export.identity import step_identity
from poetmodel.export.migration import load_generation, match_state
from poetmodel.export.replay import create_replay, order_outputs
from poetmodel.export.source import StepSource
from poetmodel.export.values import check_values
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.lowered.step import Weights, reading_state
from poetmodel.lowered.tables import with_byte_inputs
from poetmodel.plan import check_plan
from poetmodel.plan.alignment import align_sizes, device_alignment
from poetmodel.plan.arena_check import check_arena
from poetmodel.problem import Problem
from poetmodel.solver.fitting import fit_arena
from poetmodel.solver.request import Request
from poetmodel.solver.tile_trials import cheapest_tiles
from poetmodel.tiling.choice import chosen_tiles, fitting_tiles, needed_bytes, parse_tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from poetmodel.device import Device
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import OnProgress

DEVICE = "nrf52840"
"""The device whose costs count unless another is named: a Cortex-M4 with 256 KiB."""
STEP_RATIO: Final = 0.9
"""Share of the time limit for the step; the rest is for checks, and for an inference."""
INTERRUPTED_RATIO: Final = 0.1
"""The same if Ctrl-C ended the trials of tiles: time to plan the schedule that they found."""


class ExportKeywords(TypedDict, total=False):
    """Keywords of `export_step` that `poetmodel.torch.export` passes on."""

    ram: str | int | Budget | None
    device: str | Device
    profile: str | Path | Costs | None
    stack: str | int | None
    tile: str | int | TileChoice | None
    paging: bool
    recompute: bool
    minimize: str
    deadline: str | float | None
    time_limit: float
    gap: float
    commit: bool
    commit_every: int
    checksum: bool
    replay: int
    migrate_from: str | Path | None
    byte_inputs: Mapping[str, str]
    prefix: str
    weights: WeightsFormat | str
    shared_kernels: str | Path | None
    command: str
    on_progress: OnProgress | None


def export_step(  # noqa: PLR0913 - one way in, and all but two of its parameters have defaults
    step: LoweredStep,
    folder: Path,
    *,
    ram: str | int | Budget | None = None,
    device: str | Device = DEVICE,
    profile: str | Path | Costs | None = None,
    stack: str | int | None = None,
    tile: str | int | TileChoice | None = "auto",
    paging: bool = True,
    recompute: bool = True,
    minimize: str = "energy",
    deadline: str | float | None = None,
    time_limit: float = 60.0,
    gap: float = 0.01,
    commit: bool = False,
    commit_every: int = 1,
    checksum: bool = True,
    infer: bool = False,
    evaluate: bool = False,
    replay: int = 0,
    migrate_from: str | Path | None = None,
    byte_inputs: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "pm",
    weights: WeightsFormat | str = WeightsFormat.C,
    shared_kernels: str | Path | None = None,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> Deployment:
    """Write a folder of C that trains a step within all of a device's RAM.

    Parameters
    ----------
    step : LoweredStep
        What is computed.
    folder : Path
        Where to write; made if it is not there.
    ram : str or int, optional
        All of the RAM that a step takes: state, tensors, inputs, stack, runtime. Bytes, or a size
        such as ``256KiB``; a percentage of the keep-all peak, as for `poetmodel.Problem`, is for
        state and tensors, and the others come on top. Default: the device's.
    device : str or Device
        Whose costs, storage and RAM count.
    profile : str, Path or Costs, optional
        Measured costs in place of the device's estimates.
    stack : str or int, optional
        What to reserve for the stack. Default: 1536 bytes, 2048 with `commit`.
    tile : str or int, optional
        Largest tensor, such as ``32KiB``: parameters and activations that are larger are in slices
        of channels, as far as kernels take these. ``none`` or None for whole ones. ``auto``
        leaves them whole if the minimum RAM fits so; else it solves with up to four sizes that fit
        for a share of the time, and takes the one with the best schedule. Default: ``auto``.
    paging, recompute : bool
        Whether tensors may be paged, and computed again.
    minimize : {'energy', 'time', 'ram', 'writes'}
        What the schedule is best in.
    deadline : str or float, optional
        Time limit of a step: seconds, ``20ms``, or ``150%`` of one computation of every node.
    time_limit : float
        Wall time for everything but the writing of the files: all solves, plans and addresses,
        those of forward passes included [s]. What was found by then is written.
    gap : float
        Gap of the overhead at which the solver stops.
    commit : bool
        Whether storage keeps generations of all state, so that one is whole at any moment.
    commit_every : int
        In each how many steps state goes there; above 1 it implies `commit`, and all state that is
        replaced must have its home in RAM.
    checksum : bool
        Whether committed state has checksums, which are compared when it is read.
    infer : bool
        Whether ``pm_infer`` is wanted too: the forward pass in evaluation mode. Its step must have
        been captured with it.
    evaluate : bool
        Whether ``pm_evaluate`` is wanted too: loss and correct classes of a batch in evaluation
        mode, and with `commit` ``pm_keep_best`` and ``pm_restore_best``. Captured like `infer`.
    replay : int
        How many samples storage has room for, as the outputs of the frozen front and what else
        nodes behind it read: ``pm_keep_sample`` stores them, and ``pm_step_stored`` trains behind
        the front. 0: none.
    migrate_from : str or Path, optional
        The folder of an earlier export with commits, whose state ``pm_migrate`` takes over from
        storage: tensors of equal names, shapes and types.
    byte_inputs : mapping
        Inputs of real numbers, by name, that the step is to take as bytes, and what these mean:
        ``uint8:0.0039`` are integers times a scale, ``uint8:0.01,0.02,0.01:-1.5`` with a scale for
        each channel, and an offset that is added. Inputs that are bytes already need none.
    prefix : str
        What all names of C begin with: two steps of other prefixes link into one program.
    weights : {'c', 'binary'}
        Whether the first values of state are an array of C, or a file that the assembler includes.
    shared_kernels : str or Path, optional
        A folder for the kernels, which several steps share: each adds those that it needs.
    command : str
        What made the folder, for its readers.
    on_progress : callable, optional
        As for `poetmodel.solve`: called with the progress of each solve.

    Returns
    -------
    Deployment
        What was written, with the result of the solve.

    Raises
    ------
    InputError
        If an option has no such value, or parameters, buffers, constants or optimizer state are
        not finite.
    BudgetError
        If the RAM leaves no room for any schedule.
    FlashError
        If program and storage do not fit the flash of the device.
    NoScheduleError
        If no schedule keeps the limits, or none was found in time.
    """
    clock = Request(time_limit_s=time_limit, gap=gap, on_progress=on_progress)
    board = check_options(
        folder,
        ram=ram,
        device=device,
        profile=profile,
        stack=stack,
        tile=tile,
        minimize=minimize,
        deadline=deadline,
        time_limit=time_limit,
        gap=gap,
        commit=commit,
        commit_every=commit_every,
        byte_inputs=byte_inputs,
        prefix=prefix,
        weights=weights,
        shared_kernels=shared_kernels,
        replay=replay,
    )
    for option, wanted, part in (
        ("infer", infer, step.inference),
        ("evaluate", evaluate, step.evaluation),
    ):
        if wanted and part is None:
            raise InputError(
                f"{option}: {step.graph.name} was captured without its forward pass in evaluation "
                f"mode; capture it again, with {option}"
            )
    step = replace(
        step,
        inference=step.inference if infer else None,
        evaluation=step.evaluation if evaluate else None,
    )
    check_values(step)
    step = fuse_byte_quantization(with_byte_inputs(step, byte_inputs))
    commit = commit or commit_every > 1
    source = _migration_source(migrate_from, board, commit=commit)
    sample_storage = partial(_sample_storage, samples=replay, device=board, commit=commit)
    stored = sample_storage(step)
    identity = step_identity(step)
    stack = stack_bytes(stack, commit=commit)
    reserved = reserved_bytes(step, stack, stored)
    ram_bytes = _ram_bytes(step, board, ram, reserved)
    choice = parse_tile(tile)
    pages = paging and _costs(step, board, profile).pages is not None
    room = ram_bytes - reserved
    whole, first = step, Weights.of(step)
    least_plan, no_addresses = smallest_program(step)
    deployment = Deployment(
        step=step,
        identity=identity,
        plan=least_plan,
        arena=no_addresses,
        ram_bytes=ram_bytes,
        stack_bytes=stack,
        device=board,
        commit=commit and bool(step.graph.replacement_of),
        commit_every=commit_every,
        checksum=checksum,
        replay=stored,
        prefix=prefix,
        weights=WeightsFormat(weights),
        shared_kernels=None
        if shared_kernels is None
        else Path(os.path.relpath(shared_kernels, folder)).as_posix(),
    )
    if board.flash is not None and min_weight_bytes(step) > board.flash.size_bytes:
        check_flash(_with_sizes(deployment, first), at_least=True)  # of no tiles, which need more

    def stated(step: LoweredStep) -> Problem:
        return Problem(
            step.graph,
            _costs(step, board, profile),
            ram=room,
            deadline=deadline,
            recompute=recompute,
            paging=pages,
            minimize=minimize,
            commit=commit_every if commit else None,
        )

    with_tiles = partial(_with_tiles, deployment, stored=sample_storage)
    fitting = fitting_tiles(
        step, choice, board, room_bytes=room, paging=pages, names_nodes=profile is not None
    )
    chosen = cheapest_tiles(_within_flash(fitting, with_tiles), stated, clock)
    tile_bytes, step = chosen.tile_bytes, chosen.step
    if tile_bytes is not None:
        first = Weights.of(step)
        deployment = replace(with_tiles(tile_bytes, step), tile_trials=chosen.trials)
        stored = deployment.replay
    check_flash(_with_sizes(deployment, first), at_least=True)
    least = needed_bytes(step, board, paging=pages)
    if least > room:
        remedies = _ram_remedies(
            whole,
            choice,
            board,
            least=least,
            ram_bytes=ram_bytes,
            reserved=reserved,
            paging=paging,
        )
        raise ram_error(
            step,
            board,
            ram_bytes=ram_bytes,
            reserved=reserved,
            least=least,
            tile_bytes=tile_bytes,
            paging=pages,
            remedies=remedies,
        )
    problem = stated(step)
    if problem.table.commit is not None:
        _check_storage(2 * problem.table.commit.generation_bytes, board, commit=True)
    available = board.ram_bytes - reserved
    result, plan, arena = _fitted(
        problem,
        board,
        clock,
        INTERRUPTED_RATIO if chosen.interrupted else STEP_RATIO,
        available_bytes=available,
        start=None if chosen.result is None else chosen.result.schedule,
    )
    stored = stored and order_outputs(stored, step, plan)
    migration = None if source is None else match_state(step, source)
    deployment = replace(
        deployment, plan=plan, arena=arena, result=result, replay=stored, migration=migration
    )
    _check_migration(deployment)
    if step.inference is not None:
        made = _forward_pass("inference", deployment, step.inference, problem, board, clock)
        deployment = replace(deployment, inference=made)
    if step.evaluation is not None:
        made = _forward_pass("evaluation", deployment, step.evaluation, problem, board, clock)
        deployment = replace(deployment, evaluation=made)
    _check_storage(
        deployment.least_stored_bytes,
        board,
        commit=bool(deployment.rotating),
        has_more_ram=ram_bytes < board.ram_bytes,
    )
    deployment = _with_sizes(deployment, first)
    check_flash(deployment)
    write_folder(deployment, folder, command=command)
    return deployment


def _sample_storage(
    step: LoweredStep, samples: int, device: Device, *, commit: bool
) -> Replay | None:
    """Return the storage of samples, None without any; raise if there is no place for them."""
    if not samples:
        return None
    if device.is_volatile and not commit:
        raise InputError(
            f"replay: the storage of {device.name} forgets without power, and stored samples with "
            "it; commit to its flash too, where samples lie then"
        )
    return create_replay(step, samples, GenerationLayout.for_device(device))


def _migration_source(
    folder: str | Path | None, device: Device, *, commit: bool
) -> dict[str, Any] | None:
    """Return how the folder wrote generations whose state is taken over, if one is named."""
    if folder is None:
        return None
    source = load_generation(folder)
    if not commit or device.is_volatile or source["in_flash"]:
        raise InputError(
            "migrate_from: expected commits to the storage of the device, of both folders; give "
            "commit, or copy state by name where storage forgets without power"
        )
    return source


def _check_migration(deployment: Deployment) -> None:
    """Raise if a step has state on storage that no generation has: it is written before them."""
    graph = deployment.step.graph
    names = {graph.tensors[i].name for i in graph.state_tensors} - {*deployment.generation}
    if deployment.migration is not None and names - deployment.resident_names:
        raise InputError(
            f"migrate_from: {listed(sorted(names))} lies on storage, and no step replaces it, so "
            "that it is in no generation; give more ram"
        )


def check_export(folder: Path, **options: Unpack[ExportKeywords]) -> Device:
    """Return the device of `export_step` with these options; raise as it does for each of them.

    Call this before a capture: it needs no step.
    """
    given = signature(export_step).bind(None, folder, **options)
    given.apply_defaults()
    checked = signature(check_options).parameters
    board = check_options(**{name: x for name, x in given.arguments.items() if name in checked})
    check_ram(given.arguments["ram"], given.arguments["stack"], board)
    return board


def _with_tiles(
    deployment: Deployment,
    tile_bytes: int | None,
    step: LoweredStep,
    *,
    stored: Callable[[LoweredStep], Replay | None],
) -> Deployment:
    """Return a deployment of a step in tiles of a size [B], without decisions.

    `stored` returns its storage of samples.
    """
    plan, arena = smallest_program(step)
    cut = replace(deployment, step=step, tile_bytes=tile_bytes, replay=stored(step))
    return replace(cut, plan=plan, arena=arena)


def _within_flash(
    fitting: list[tuple[int | None, LoweredStep]],
    with_tiles: Callable[[int | None, LoweredStep], Deployment],
) -> list[tuple[int | None, LoweredStep]]:
    """Return the first size of tiles, and others for which the flash may have room."""
    first, *others = fitting
    return [first, *(each for each in others if _fits_flash(with_tiles(*each)))]


def _fits_flash(deployment: Deployment) -> bool:
    """Return whether the flash may have room for what every plan of a step needs there."""
    try:
        check_flash(_with_sizes(deployment, Weights.of(deployment.step)), at_least=True)
    except FlashError:
        return False
    return True


def _with_sizes(deployment: Deployment, weights: Weights) -> Deployment:
    """Return a deployment that knows what its program takes of flash."""
    source = StepSource(deployment, weights)
    return replace(deployment, program=program_sizes(deployment, source))


def _fitted(
    problem: Problem,
    device: Device,
    clock: Request,
    ratio: float = 1.0,
    *,
    available_bytes: int | None = None,
    start: Schedule | None = None,
) -> tuple[SolveResult, Plan, Arena]:
    """Return a schedule with its plan and addresses, all checked; raise where there is none.

    It may take a share of the time that is left. The device has `available_bytes` for tensors.
    """
    mode = StorageMode.BLOCKING if device.storage is None else device.storage.mode
    limit_s = max(ratio * clock.remaining_s(), 1e-3)
    result, plan, arena = fit_arena(
        problem,
        mode=mode,
        alignment=device_alignment(device),
        time_limit=limit_s,
        gap=clock.gap,
        on_progress=clock.on_progress,
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
        raise VerificationError([fault for check in checks for fault in check])
    return result, plan, arena


def _forward_pass(
    kind: str,
    deployment: Deployment,
    captured: LoweredStep,
    problem: Problem,
    device: Device,
    clock: Request,
) -> ForwardPass:
    """Plan a forward pass beside a step: in the RAM above the state that lives there."""
    resident = deployment.resident_bytes
    mapped = deployment.plan.memory_mapped
    tensors, homes = deployment.step.graph, deployment.plan.resident or ()
    stored = {tensors.tensors[i].name for i in tensors.state_tensors if i not in homes}
    step = reading_state(captured, () if mapped else stored)
    least = floor(align_sizes(step.graph, device_alignment(device))).bytes
    room = problem.usable_ram_bytes - resident
    if room < least:
        missing = least - room
        has_more = deployment.ram_bytes + missing <= device.ram_bytes
        more = f"give {missing:,} B more, or " if has_more else ""
        raise BudgetError(
            f"ram: state in RAM leaves {max(0, room):,} B for an {kind}, and one node of it "
            f"needs {least:,} B; {more}leave {_OPTIONS[kind]} out"
        )
    aux = problem.aux_limit_bytes
    wanted = replace(
        problem,
        graph=step.graph,
        costs=Costs.estimate(step.graph, device),
        ram=room,
        deadline=None,
        aux_bytes=None if aux is None else max(0, aux - deployment.least_stored_bytes),
    )
    _, plan, arena = _fitted(wanted, device, clock)
    return ForwardPass(kind=kind, step=step, plan=plan, arena=arena)


_OPTIONS: Final = {"inference": "infer", "evaluation": "evaluate"}
"""The options that ask for forward passes, by their kinds."""


def _check_storage(
    stored_bytes: int, device: Device, *, commit: bool, has_more_ram: bool = False
) -> None:
    """Raise if the storage of the device has no room for what a step keeps there [B].

    More RAM is advised if the device `has_more_ram`. Generations of state are in its flash where
    its storage forgets.
    """
    flash = device.flash if commit and device.is_volatile else None
    room = device.aux_bytes if flash is None else flash.storage_bytes
    if room is None or stored_bytes <= room:
        return
    what, blocks = "what is kept there takes", ""
    advice = "give more ram" if has_more_ram else "take a smaller network or another device"
    if commit:
        what = "both generations of all state there take"
        advice = "train fewer parameters, or leave commit out"
    if commit or not device.is_volatile:
        blocks = f" in blocks of {GenerationLayout.for_device(device).erase_block_bytes:,} B"
    raise BudgetError(
        f"{'storage' if flash is None else 'flash'}: {what} {stored_bytes:,} B{blocks}, and device "
        f"{device.name} has {room:,} B; {advice}"
    )


def _costs(step: LoweredStep, device: Device, profile: str | Path | Costs | None) -> Costs:
    if profile is None:
        return Costs.estimate(step.graph, device)
    if isinstance(profile, Costs):
        return replace(profile, device=device)
    return Costs.load(profile, device=device)


def _ram_bytes(
    step: LoweredStep, device: Device, ram: str | int | Budget | None, reserved: int
) -> int:
    """Return all RAM of a step that is not in tiles [B]; `reserved` is for what is no tensor [B].

    100 % keeps everything, with the sizes that tensors have in a block too.
    """
    if ram is None:
        return device.ram_bytes
    budget = Budget.parse(ram)
    room = budget.tensor_bytes(checkpoint_all_peak_bytes(step.graph), reserved_bytes=reserved)
    if budget.keeps_all:
        aligned = align_sizes(step.graph, device_alignment(device))
        room = max(room, checkpoint_all_peak_bytes(aligned))
    return room + reserved


def _ram_remedies(
    whole: LoweredStep,
    choice: TileChoice,
    device: Device,
    *,
    least: int,
    ram_bytes: int,
    reserved: int,
    paging: bool,
) -> Iterator[str]:
    """Yield each option with which one node of a step needs less, and no more than the device has.

    `least` is what it needs now [B]. Options are those of `export_step`.
    """

    def needed(choice: TileChoice, *, paging: bool) -> tuple[int | None, int]:
        room = ram_bytes - reserved
        size, step = chosen_tiles(whole, choice, device, room_bytes=room, paging=paging)
        return size, needed_bytes(step, device, paging=paging)

    have = device.ram_bytes - reserved
    if not choice.is_auto:
        size, in_tiles = needed(TileChoice.AUTO, paging=paging)
        if in_tiles < least and in_tiles <= have:
            named = TileChoice(size_bytes=size)
            yield f"take tile {named}, with which it needs {in_tiles + reserved:,} B in all"
    if not paging and device.storage is not None:
        _, paged = needed(choice, paging=True)
        if paged < least and paged <= have:
            yield f"allow paging, with which it needs {paged + reserved:,} B in all"
