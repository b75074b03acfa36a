"""RAM of a training step on a device, whatever budget it was planned for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError
from poetmodel.graph import Graph, Phase, checkpoint_all_profile, floor
from poetmodel.graph.catalogue import Variant, load_model, model_names
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from poetmodel.device.hardware import Device
    from poetmodel.graph.catalogue import InputShape

ROOM: Final = ("resident_bytes", "device_ram_bytes", "fits_device")
"""Keys of files and JSON about the RAM of a device."""
GAUGE: Final = "device_ram"
"""The key of the gauge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamUse:
    """RAM in use at one step of a schedule, by kind."""

    state_bytes: int = 0
    """Parameters and moments: state that is resident, and copies of state on storage [B]."""
    activation_bytes: int = 0
    """Everything else: what the forward pass and the loss made, and samples [B]."""
    gradient_bytes: int = 0
    """Bytes made by nodes of the backward pass [B]."""
    workspace_bytes: int = 0
    """Memory that the step needs only while it runs [B]."""

    @property
    def total_bytes(self) -> int:
        """All kinds together [B]."""
        return self.state_bytes + self.activation_bytes + self.gradient_bytes + self.workspace_bytes

    def with_resident(self, graph: Graph) -> RamUse:
        """Return the use with the resident bytes of a graph, each kind where it belongs."""
        kinds = dict(graph.resident_bytes)
        gradient_bytes = kinds.pop("gradients", 0)
        return RamUse(
            state_bytes=self.state_bytes + sum(kinds.values()),
            activation_bytes=self.activation_bytes,
            gradient_bytes=self.gradient_bytes + gradient_bytes,
            workspace_bytes=self.workspace_bytes,
        )


def ram_use(
    graph: Graph, copies: Iterable[int], *, step: int | None = None, dying: Collection[int] = ()
) -> RamUse:
    """Return the RAM of a step, by kind.

    Parameters
    ----------
    graph : Graph
        The training graph.
    copies : iterable of int
        The tensors in RAM during the step, each as often as there are copies of it; what replaces
        state takes nothing.
    step : int, optional
        The node that is computed, which adds its workspace. None where the step only pages.
    dying : collection of int
        The tensors whose last use this is. What an output saves by taking over the memory of one of
        them is off its own kind.
    """
    sizes = graph.tensor_bytes
    of_kind = {"state": 0, "activation": 0, "gradient": 0}
    for i in copies:
        of_kind[kind_of(graph, i)] += 0 if i in graph.state_of else sizes[i]
    if step is not None:
        for y, x in graph.in_place_of[step]:
            if x in dying:
                of_kind[kind_of(graph, y)] -= graph.shared_bytes_of[step].get(x, 0)
    return RamUse(
        **{f"{kind}_bytes": used for kind, used in of_kind.items()},
        workspace_bytes=0 if step is None else graph.nodes[step].workspace_bytes,
    )


def kind_of(graph: Graph, i: int) -> str:
    """Return the kind of a tensor: ``state``, ``activation`` or ``gradient``."""
    phase = graph.nodes[graph.node_of[i]].phase
    return {Phase.STATE: "state", Phase.BACKWARD: "gradient"}.get(Phase(phase), "activation")


def part_of(graph: Graph, i: int | None) -> int:
    """Return the member of `PARTS` for a tensor; None stands for a workspace."""
    if i is None:
        return len(PARTS) - 1
    return ("state", "activation", "gradient").index(kind_of(graph, i))


def keep_all_use(graph: Graph) -> RamUse:
    """Return the use at the keep-all peak: everything is kept to its last use, state throughout."""
    profile = checkpoint_all_profile(graph)
    k = profile.index(max(profile))
    last_use = [
        max(users, default=maker)
        for users, maker in zip(graph.users_of, graph.node_of, strict=True)
    ]
    kept = [
        i
        for i, maker in enumerate(graph.node_of)
        if graph.nodes[maker].is_state or maker <= k <= last_use[i]
    ]
    dying = {i for i in kept if last_use[i] == k and not graph.nodes[graph.node_of[i]].is_state}
    return ram_use(graph, kept, step=k, dying=dying)


def floor_use(graph: Graph, *, memory_mapped: bool = False) -> RamUse:
    """Return the use at the floor, the largest working set of one step; see `floor`."""
    k = floor(graph, memory_mapped=memory_mapped).node
    apart = graph.state_tensors if memory_mapped else ()
    copies = {*graph.inputs_of[k], *graph.outputs_of[k]}.difference(apart)
    return ram_use(graph, copies, step=k, dying=graph.inputs_of[k])


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A built-in network with its state in the graph, in place of resident bytes beside it."""

    state: str
    in_place: bool
    min_bytes: int
    """Minimum RAM of the whole step [B]."""


def find_whole_step(
    name: str, shape: InputShape, device: Device | None, *, paging: bool
) -> WholeStep | None:
    """Return the whole step of a built-in network if it fits a device.

    None if the network is no built-in one, has its state in the graph already, or exceeds the RAM
    of the device even with the smallest optimizer and operators in place.
    """
    if device is None or name not in model_names() or shape.overrides.get("state"):
        return None
    pages = paging and device.storage is not None
    whole = WholeStep(state="sgd", in_place=True, min_bytes=0)
    options = {**asdict(shape), "state": whole.state, "in_place": whole.in_place}
    try:
        graph = load_model(name, Variant(**options))
    except InputError:  # published graphs have no state
        return None
    mapped = pages and device.is_memory_mapped
    least = floor(graph, memory_mapped=mapped, resident=not pages)
    return replace(whole, min_bytes=least.bytes) if least.bytes <= device.ram_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """RAM of a step on a device: its peak and the resident bytes."""

    device: str
    """Short name of the device."""
    ram_bytes: int
    """RAM of the device [B]."""
    peak_bytes: int
    """Most that tensors and workspaces take at once [B]."""
    resident_bytes: int
    """Parameters, gradients and optimizer state, which stay in RAM beside them [B]."""
    use: RamUse | None = None
    """Both by kind; None where only their sum is known."""

    @classmethod
    def of(cls, device: Device | None, graph: Graph, peak: int | RamUse) -> DeviceRoom | None:
        """Compare a peak of a graph's training step with a device; None where there is none."""
        if device is None:
            return None
        use = peak if isinstance(peak, RamUse) else None
        return cls(
            device=device.short_name,
            ram_bytes=device.ram_bytes,
            peak_bytes=peak.total_bytes if isinstance(peak, RamUse) else peak,
            resident_bytes=graph.total_resident_bytes,
            use=None if use is None else use.with_resident(graph),
        )

    @property
    def needed_bytes(self) -> int:
        """Peak and resident bytes together [B]."""
        return self.peak_bytes + self.resident_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has that much RAM."""
        return self.needed_bytes <= self.ram_bytes

    @property
    def free_bytes(self) -> int:
        """Free RAM, 0 if there is none [B]."""
        return max(0, self.ram_bytes - self.needed_bytes)

    @property
    def missing_bytes(self) -> int:
        """Missing RAM, 0 if the step fits [B]."""
        return max(0, self.needed_bytes - self.ram_bytes)

    def remark(self) -> str:
        """Describe whether the step fits, what it needs, and which part is too much."""
        return f"{'fits' if self.fits else 'does not fit'}; {self._needs()}"

    def warning(self) -> str | None:
        """Return a sentence where the step does not fit, else None."""
        if self.fits:
            return None
        ram = format_bytes(self.ram_bytes)
        return (
            f"the step does not fit device {self.device}, which has {ram} of RAM: {self._needs()}"
        )

    def _needs(self) -> str:
        peak, resident = format_bytes(self.peak_bytes), format_bytes(self.resident_bytes)
        needs = f"it needs {peak} at the peak"
        if self.resident_bytes:
            needs += f" and {resident} of resident bytes, {format_bytes(self.needed_bytes)} in all"
        if self.fits:
            return needs
        if self.peak_bytes > self.ram_bytes:
            both = self.resident_bytes > self.ram_bytes
            return f"{needs}; {'each' if both else 'the peak'} alone is too much"
        if self.resident_bytes > self.ram_bytes:
            return f"{needs}; the resident bytes alone are too much"
        return f"{needs}; together they are too much"


def room_figures(room: DeviceRoom | None) -> dict[str, Any]:
    """Return the figures that files and JSON state and the gauge, None without a device."""
    values = dict.fromkeys(ROOM)
    if room is not None:
        values |= zip(ROOM, (room.resident_bytes, room.ram_bytes, room.fits), strict=True)
    return values | {GAUGE: gauge(room)}


PARTS: Final = ("state", "activations", "gradients", "workspace")
"""The kinds of a gauge, in words, in the order of `RamUse`."""


def gauge(room: DeviceRoom | None) -> dict[str, Any] | None:
    """Return the gauge of a device for JSON: RAM by kind and whether the step trains there.

    Resident bytes count, whatever the budget counts. None where the kinds are not known.
    """
    if room is None or room.use is None:
        return None
    return {
        "ram_bytes": room.ram_bytes,
        **asdict(room.use),
        "free_bytes": room.free_bytes,
        "missing_bytes": room.missing_bytes,
        "trains": room.fits,
    }


def gauge_claims(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the figures of a gauge by their places in JSON; nothing without one."""
    return {f"{GAUGE}.{key}": value for key, value in (values or {}).items()}


def gauge_words(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the RAM that is left or missing, and what takes the rest, in words."""
    taken = {name: values[part.name] for name, part in zip(PARTS, fields(RamUse), strict=True)}
    parts = [f"{name} {format_bytes(size)}" for name, size in taken.items() if size]
    rest = f"{format_bytes(values['free_bytes'])} free"
    if values["missing_bytes"]:
        rest = f"{format_bytes(values['missing_bytes'])} missing"
    return rest, ", ".join(parts)
