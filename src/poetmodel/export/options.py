"""Options of an export: parsed, checked and described in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self, TypedDict, Unpack

from poetmodel.budgets import Budget, TileChoice
from poetmodel.case.case import Case
from poetmodel.device import Costs, Device
from poetmodel.device.generation import MIN_WRITE_UNIT_BYTES, GenerationLayout
from poetmodel.errors import BudgetError, InputError
from poetmodel.export.migration import load_generation_layout
from poetmodel.export.paths import check_folder, check_prefix, check_shared_folder
from poetmodel.export.replay import check_samples
from poetmodel.export.reserves import RUNTIME_BYTES, parse_stack
from poetmodel.graph.catalogue import Variant
from poetmodel.lowered.tables import parse_byte_inputs
from poetmodel.problem import Limits, Quantity
from poetmodel.problem.infeasibility import missing_unit_hint
from poetmodel.solver.request import SearchOptions
from poetmodel.tiling.choice import parse_tile
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.export.manifest import Generation
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.solver.request import OnProgress, Request

DEFAULT_DEVICE: Final = "nrf52840"
"""Default device of an export: a Cortex-M4 with 256 KiB of RAM."""


class WeightsFormat(StrEnum):
    """Format of the initial values of state and of the constants in an exported folder."""

    C = "c"
    """An array in C, for any build system."""
    BINARY = "binary"
    """A binary file that the assembler includes: faster to build if the weights are large."""


class SettingKeywords(TypedDict, total=False):
    """Keywords of `ExportOptions.of_limits` that `poetmodel.torch.export` accepts, too."""

    device: str | Device
    profile: str | Path | Costs | None
    stack: str | int | None
    tile: str | int | TileChoice | None
    checksum: bool
    replay: int
    replay_cut: str | None
    migrate_from: str | Path | None
    byte_inputs: Mapping[str, str]
    prefix: str
    weights: WeightsFormat | str
    shared_kernels: str | Path | None
    command: str
    on_progress: OnProgress | None


class ExportKeywords(SettingKeywords, total=False):
    """Keywords of `ExportOptions.parse` that `poetmodel.torch.export` accepts, too."""

    ram: str | int | Budget | None
    paging: bool
    recompute: bool
    minimize: str
    deadline: str | float | None
    deadline_counts: str | None
    aux_bytes: str | int | None
    time_limit: float
    gap: float
    commit: bool
    commit_every: int


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Valid options of an export; see `parse`."""

    folder: Path
    device: Device
    limits: Limits
    """RAM, deadline and allowed decisions, as stated; RAM includes what `reserved_bytes` counts."""
    search: SearchOptions
    """Gap tolerance, and wall time of all solves, from the call of `request` on."""
    profile: Costs | None
    """Measured costs of the device, read once; None for estimates."""
    stack_bytes: int
    tile: TileChoice
    checksum: bool
    infer: bool
    evaluate: bool
    samples: int
    """Number of stored samples of latent replay; 0 for none."""
    replay_cut: str | None
    """Last node of the front of latent replay; None for that of the smallest samples."""
    migration_source: Generation | None
    """Layout of the generations of the earlier export whose state is migrated, if any."""
    byte_inputs: Mapping[str, str]
    prefix: str
    weights: WeightsFormat
    shared_kernels: Path | None
    command: str
    on_progress: OnProgress | None

    @classmethod
    def parse(  # noqa: PLR0913 - each limit of an export
        cls,
        folder: str | Path,
        *,
        ram: str | int | Budget | None = None,
        paging: bool = True,
        recompute: bool = True,
        minimize: str = "energy",
        deadline: str | float | None = None,
        deadline_counts: str | None = None,
        aux_bytes: str | int | None = None,
        time_limit: float = 60.0,
        gap: float = 0.01,
        commit: bool = False,
        commit_every: int = 1,
        infer: bool = False,
        evaluate: bool = False,
        **settings: Unpack[SettingKeywords],
    ) -> Self:
        """Parse and check all options that need no step.

        Parameters
        ----------
        folder : str or Path
            The folder to write; created if it does not exist. C files, headers and weight files
            that only an earlier export wrote there are deleted.
        ram : str or int, optional
            RAM limit of the step: state, tensors, inputs, output of ``pm_infer``, stored samples,
            stack and runtime together. Bytes, or a size such as ``256KiB``. A percentage is
            relative to the keep-all peak, as for `poetmodel.Problem`, and counts state, tensors and
            workspaces only. The limit may exceed the RAM of the device, which is the default.
        device : str or Device
            The device: source of costs, and of the limits on RAM, storage and flash.
        profile : str, Path or Costs, optional
            Measured costs in place of the device's estimates.
        stack : str or int, optional
            Reserved size of the stack. Default: 1536 bytes, 2048 with commits.
        tile : str or int, optional
            Maximum size of a tensor, such as ``32KiB``: larger parameters and activations are
            divided into slices of channels, if their kernels support it. ``none`` or None: no
            division. ``auto``: no division if the minimum RAM fits without; otherwise the best of
            up to four sizes that fit, each solved for a fraction of the time. With `profile`, the
            largest size that fits, because each size has other node names. Default: ``auto``.
        paging, recompute : bool
            Whether tensors may be paged, and recomputed.
        minimize : {'energy', 'time', 'ram', 'writes'}
            Objective of the schedule.
        deadline : str or float, optional
            Time limit of a step: seconds, ``20ms``, or ``150%`` of one computation of every node.
        deadline_counts : {'compute', 'serial', 'overlap'}, optional
            The time that the deadline limits, as for `poetmodel.Problem`.
        aux_bytes : str or int, optional
            Storage for paged-out tensors and state on storage. Default: the device's.
        time_limit : float
            Limit on the wall time of all solves, plans and offsets, those of forward passes
            included; files are written after it [s]. The best result within it is exported.
        gap : float
            Gap of the overhead at which the solver stops.
        commit : bool
            Whether storage, or flash if storage is volatile, has generations of the state that a
            step replaces. One generation is complete at any time.
        commit_every : int
            Number of steps between two commits. Above 1, it implies `commit`, and all replaced
            state has its home in RAM unless storage is volatile.
        checksum : bool
            Whether committed state has checksums, which are checked when it is read.
        infer : bool
            Whether to export ``pm_infer``, the forward pass in evaluation mode. The step must have
            been captured with it.
        evaluate : bool
            Whether to export ``pm_evaluate``: loss and correct classes of a batch in evaluation
            mode; with `commit`, also ``pm_keep_best`` and ``pm_restore_best``. The step must have
            been captured with it.
        replay : int
            Number of samples on storage, or in flash if storage is volatile, each as the outputs of
            the frozen front and inputs that later nodes read. ``pm_keep_sample`` stores a sample,
            ``pm_step_stored`` trains on stored samples. 0: none.
        replay_cut : str, optional
            The last node of the frozen front for samples, by its name in the graph. Default: the
            node whose samples have the fewest bytes; a later one may save more instructions.
        migrate_from : str or Path, optional
            The folder of an earlier export with commits. ``pm_migrate`` copies its state from
            storage: tensors with the same name, shape and type.
        byte_inputs : mapping
            Real inputs that the step receives as bytes, by name, with their conversion:
            ``uint8:0.0039`` multiplies integers by a scale, ``uint8:0.01,0.02,0.01:-1.5`` by a
            scale for each channel, and adds an offset. Inputs that are bytes already need no entry.
        prefix : str
            Prefix of all names in C. Steps with different prefixes can be linked into one program.
        weights : {'c', 'binary'}
            Format of constants and initial values of state: an array in C, or a binary file that
            the assembler includes.
        shared_kernels : str or Path, optional
            A folder of kernels that several steps share: each export adds the kernels that it
            needs.
        command : str
            The command that exported the folder, for its README and manifest.
        on_progress : callable, optional
            Called with the progress of each solve, as for `poetmodel.solve`.

        Raises
        ------
        InputError
            For the first invalid option; `BudgetError` for a size or limit. Leaves no file.
        """
        if type(commit_every) is not int or commit_every < 1:
            raise InputError(
                f"commit_every: expected a number of steps from 1, got {commit_every!r}"
            )
        limits = Limits(
            ram=ram,
            deadline=deadline,
            deadline_counts=deadline_counts,
            aux_bytes=aux_bytes,
            recompute=recompute,
            paging=paging,
            minimize=minimize,
            commit=commit_every if commit or commit_every > 1 else None,
        )
        search = SearchOptions(time_limit_s=time_limit, gap=gap)
        return cls.of_limits(folder, limits, search, infer=infer, evaluate=evaluate, **settings)

    @classmethod
    def of_limits(  # noqa: PLR0913 - each setting of an export
        cls,
        folder: str | Path,
        limits: Limits,
        search: SearchOptions,
        *,
        device: str | Device = DEFAULT_DEVICE,
        profile: str | Path | Costs | None = None,
        stack: str | int | None = None,
        tile: str | int | TileChoice | None = "auto",
        checksum: bool = True,
        infer: bool = False,
        evaluate: bool = False,
        replay: int = 0,
        replay_cut: str | None = None,
        migrate_from: str | Path | None = None,
        byte_inputs: Mapping[str, str] = MappingProxyType({}),
        prefix: str = "pm",
        weights: WeightsFormat | str = WeightsFormat.C,
        shared_kernels: str | Path | None = None,
        command: str = "",
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Parse and check the settings of an export with stated limits; see `parse`."""
        folder = Path(folder)
        check_folder(folder)
        check_prefix(prefix)
        if shared_kernels is not None:
            check_shared_folder(Path(shared_kernels), folder)
        if weights not in list(WeightsFormat):
            raise InputError(f"weights: expected c or binary, got {weights!r}")
        if limits.minimize not in (None, *Quantity):
            raise InputError(
                f"minimize: expected one of {', '.join(Quantity)}, got {limits.minimize!r}"
            )
        board = Device.load(device) if isinstance(device, str) else device
        if board.is_graphics_card:
            raise InputError(
                f"device: {board.short_name} is a graphics card ({board.core}), and exported C "
                "runs on CPUs and microcontrollers; choose one of these ('poetmodel devices' lists "
                "them)"
            )
        if isinstance(profile, str | Path):
            profile = Costs.load(profile, device=board)
        parse_byte_inputs(byte_inputs)
        commit = limits.commit is not None
        if commit:
            _check_commit(board)
        check_samples(replay)
        if replay_cut is not None and not replay:
            raise InputError(
                "replay_cut: cuts stored samples, and there are none; give replay, their number"
            )
        if replay and board.storage is None:
            raise InputError(f"replay: device {board.name} has no storage for samples")
        tile_choice = parse_tile(tile)
        limits.check()
        return cls(
            folder=folder,
            device=board,
            limits=limits,
            search=search,
            profile=None if profile is None else profile.for_device(board),
            stack_bytes=parse_stack(stack, commit=commit),
            tile=tile_choice,
            checksum=checksum,
            infer=infer,
            evaluate=evaluate,
            samples=replay,
            replay_cut=replay_cut,
            migration_source=_load_migration_source(migrate_from, board, commit=commit),
            byte_inputs=byte_inputs,
            prefix=prefix,
            weights=WeightsFormat(weights),
            shared_kernels=None if shared_kernels is None else Path(shared_kernels),
            command=command,
            on_progress=on_progress,
        )

    @property
    def commit(self) -> bool:
        """Whether state is committed."""
        return self.limits.commit is not None

    @property
    def commit_every(self) -> int:
        """Number of steps between two commits; 1 without commits."""
        return self.limits.commit or 1

    @property
    def shared_path(self) -> str | None:
        """Path of the folder of shared kernels, relative to `folder`; None without one."""
        if self.shared_kernels is None:
            return None
        return Path(os.path.relpath(self.shared_kernels, self.folder)).as_posix()

    @property
    def request(self) -> Request:
        """A request whose time begins now."""
        return self.search.start(self.on_progress)

    def case(self, step: LoweredStep, *, ram_bytes: int) -> Case:
        """Return the case of a step, with `ram_bytes` for its tensors."""
        has_pages = self.device.storage is not None
        if self.profile is not None:
            has_pages = self.profile.pages is not None
        return Case(
            step=step,
            board=self.device,
            costs=self.profile,
            shape=Variant(tile=str(self.tile)),
            limits=replace(self.limits, ram=ram_bytes, paging=self.limits.paging and has_pages),
            search=self.search,
        )

    def check_ram(self) -> None:
        """Raise `BudgetError` if stack and runtime use all of a RAM limit in bytes."""
        budget = None if self.limits.ram is None else Budget.parse(self.limits.ram)
        if budget is None or budget.size_bytes is None:
            return
        ram_bytes, board = budget.size_bytes, self.device
        reserved_bytes = self.stack_bytes + RUNTIME_BYTES
        if ram_bytes <= reserved_bytes:
            has_unit = not str(budget.stated_value).isdigit() or not ram_bytes
            remark = "" if has_unit else missing_unit_hint(ram_bytes, board.ram_bytes)
            raise BudgetError(
                f"ram: {format_bytes(ram_bytes)} less {format_bytes(reserved_bytes)} for stack and "
                "runtime leave 0 B for inputs and tensors; give more, up to the "
                f"{format_bytes(board.ram_bytes)} of device {board.short_name}{remark}"
            )


def _load_migration_source(
    folder: str | Path | None, board: Device, *, commit: bool
) -> Generation | None:
    """Load the generations' layout of an earlier export; both must commit to storage, not flash."""
    if folder is None:
        return None
    source = load_generation_layout(folder)
    if not commit or board.is_volatile or source.in_flash:
        raise InputError(
            "migrate_from: expected commits to the storage of the device, of both folders; give "
            "commit, or copy state by name if storage is volatile"
        )
    return source


def _check_commit(board: Device) -> None:
    """Raise `InputError` if a device can store no generations of state."""
    if board.storage is None:
        raise InputError(f"commit: device {board.name} has no storage for two generations of state")
    if board.is_volatile:
        if board.flash is None or not board.flash.storage_bytes:
            raise InputError(
                f"commit: the storage of {board.name} is volatile, and no [flash] of it may take "
                "state; state its storage_bytes, or choose a device whose storage retains state"
            )
        return
    unit_bytes = GenerationLayout.for_device(board).write_unit_bytes
    if board.is_memory_mapped and unit_bytes > MIN_WRITE_UNIT_BYTES:
        raise InputError(
            f"commit: the storage of {board.name} is written {unit_bytes} B at a time, and updates "
            "of state that is read in place write a few numbers at a time; choose a device whose "
            "write_unit_bytes is at most 4, or storage that is not memory-mapped"
        )
