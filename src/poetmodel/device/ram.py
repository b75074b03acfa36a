"""RAM that a training step needs on a device, by kind, compared with the device's RAM."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Graph, Phase, checkpoint_all_profile, floor
from poetmodel.graph.catalogue import Variant, load_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from poetmodel.device.hardware import Device
    from poetmodel.graph.catalogue import InputShape

DEVICE_RAM_KEYS: Final = ("resident_bytes", "device_ram_bytes", "fits_device")
"""Keys in files and JSON: resident bytes of a step, RAM of the device, whether the step fits."""
GAUGE_KEY: Final = "device_ram"
"""Key of the gauge in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RamUse:
    """RAM in use at one step of a schedule, by kind; see `add_resident_bytes`."""

    state_bytes: int = 0
    """State tensors in RAM, and resident parameters and optimizer state [B]."""
    activation_bytes: int = 0
    """Samples, and outputs of the forward pass, the loss and updates [B]."""
    gradient_bytes: int = 0
    """Outputs of the backward pass, and resident gradients [B]."""
    workspace_bytes: int = 0
    """Memory that the step needs only during its execution [B]."""

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds [B]."""
        return self.state_bytes + self.activation_bytes + self.gradient_bytes + self.workspace_bytes

    def add_reserved_bytes(self, reserved_bytes: int) -> RamUse:
        """Return the RAM use plus bytes that a compiled step reserves, counted as activations."""
        return replace(self, activation_bytes=self.activation_bytes + reserved_bytes)

    def add_resident_bytes(self, graph: Graph) -> RamUse:
        """Return the RAM use plus a graph's resident bytes: gradients, and other kinds as state."""
        bytes_of_kind = dict(graph.resident_bytes)
        gradient_bytes = bytes_of_kind.pop("gradients", 0)
        return RamUse(
            state_bytes=self.state_bytes + sum(bytes_of_kind.values()),
            activation_bytes=self.activation_bytes,
            gradient_bytes=self.gradient_bytes + gradient_bytes,
            workspace_bytes=self.workspace_bytes,
        )


def ram_use(
    graph: Graph,
    copies: Iterable[int],
    *,
    step: int | None = None,
    dying_tensors: Collection[int] = (),
) -> RamUse:
    """Return the RAM in use at a step, by kind, without resident bytes.

    `copies` are the tensors in RAM during the step, its outputs included, once per copy. `step` is
    the node that is computed (None if the step only pages), `dying_tensors` those whose last use it
    is: an output that overwrites one saves its bytes. Replacements of state count 0 bytes.
    """
    sizes = graph.tensor_bytes
    bytes_of_kind = {"state": 0, "activation": 0, "gradient": 0}
    for i in copies:
        bytes_of_kind[tensor_kind(graph, i)] += 0 if i in graph.state_of else sizes[i]
    if step is not None:
        for output, source in graph.in_place_of[step]:
            if source in dying_tensors:
                bytes_of_kind[tensor_kind(graph, output)] -= graph.shared_bytes_of[step].get(
                    source, 0
                )
    return RamUse(
        **{f"{kind}_bytes": size for kind, size in bytes_of_kind.items()},
        workspace_bytes=0 if step is None else graph.nodes[step].workspace_bytes,
    )


def tensor_kind(graph: Graph, i: int) -> str:
    """Return the kind of a tensor: ``state``, ``gradient``, or ``activation`` for other phases."""
    phase = graph.nodes[graph.node_of[i]].phase
    return {Phase.STATE: "state", Phase.BACKWARD: "gradient"}.get(Phase(phase), "activation")


def kind_index(graph: Graph, i: int | None) -> int:
    """Return the index in `KIND_NAMES` of a tensor's kind; None stands for a workspace."""
    if i is None:
        return len(KIND_NAMES) - 1
    return ("state", "activation", "gradient").index(tensor_kind(graph, i))


def keep_all_ram_use(graph: Graph) -> RamUse:
    """Return the RAM use, without resident bytes, at the first node with the keep-all peak."""
    profile = checkpoint_all_profile(graph)
    peak_node = profile.index(max(profile))
    last_use_of = [
        max(users, default=maker)
        for users, maker in zip(graph.users_of, graph.node_of, strict=True)
    ]
    live_tensors = [
        i
        for i, maker in enumerate(graph.node_of)
        if graph.nodes[maker].is_state or maker <= peak_node <= last_use_of[i]
    ]
    dying_tensors = {
        i
        for i in live_tensors
        if last_use_of[i] == peak_node and not graph.nodes[graph.node_of[i]].is_state
    }
    return ram_use(graph, live_tensors, step=peak_node, dying_tensors=dying_tensors)


def floor_ram_use(graph: Graph, *, memory_mapped: bool = False) -> RamUse:
    """Return the RAM use at the node with the largest working set, which `floor` finds."""
    k = floor(graph, memory_mapped=memory_mapped).node
    mapped_tensors = graph.state_tensors if memory_mapped else ()
    copies = {*graph.inputs_of[k], *graph.outputs_of[k]}.difference(mapped_tensors)
    return ram_use(graph, copies, step=k, dying_tensors=graph.inputs_of[k])


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """Settings that put a built-in network's state into its graph, instead of resident bytes."""

    state: str
    """Optimizer whose state is in the graph."""
    in_place: bool
    """Whether operators may overwrite inputs."""
    min_bytes: int
    """Minimum RAM of the step with state [B]."""


def find_whole_step(
    name: str, shape: InputShape, device: Device | None, *, paging: bool
) -> WholeStep | None:
    """Return settings with which a built-in network's step, state included, may fit a device.

    They are SGD and in-place operators. None without a device, if the minimum RAM of that step
    exceeds the RAM, if `shape` states `state` already, and for graphs that are not built-in or have
    fixed sizes. With `paging`, state may be on the storage of the device, if it has any.
    """
    from poetmodel.graph.zoo import MODELS

    if device is None or name not in MODELS or shape.overrides.get("state"):
        return None
    can_page = paging and device.storage is not None
    settings: dict[str, Any] = {"state": "sgd", "in_place": True}
    graph = load_model(name, Variant(**asdict(shape) | settings))
    is_mapped = can_page and device.is_memory_mapped
    minimum = floor(graph, memory_mapped=is_mapped, resident=not can_page)
    if minimum.bytes > device.ram_bytes:
        return None
    return WholeStep(min_bytes=minimum.bytes, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRam:
    """Peak and resident bytes of a step, compared with the RAM of a device."""

    device: str
    """Short name of the device."""
    ram_bytes: int
    """RAM of the device [B]."""
    peak_bytes: int
    """Maximum of tensors and workspaces in RAM at once [B]."""
    resident_bytes: int
    """Parameters, gradients and optimizer state, which stay in RAM in addition to the peak [B]."""
    use: RamUse | None = None
    """Peak and resident bytes by kind; None if only their sum is known."""

    @classmethod
    def compare(cls, device: Device | None, graph: Graph, peak: int | RamUse) -> DeviceRam | None:
        """Compare the peak of a graph's training step with a device's RAM; None without a device.

        `peak` is without resident bytes; it is a size [B] if its kinds are unknown.
        """
        if device is None:
            return None
        use = peak if isinstance(peak, RamUse) else None
        return cls(
            device=device.short_name,
            ram_bytes=device.ram_bytes,
            peak_bytes=peak.total_bytes if isinstance(peak, RamUse) else peak,
            resident_bytes=graph.total_resident_bytes,
            use=None if use is None else use.add_resident_bytes(graph),
        )

    @property
    def needed_bytes(self) -> int:
        """Sum of peak and resident bytes [B]."""
        return self.peak_bytes + self.resident_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has `needed_bytes` of RAM."""
        return self.needed_bytes <= self.ram_bytes

    @property
    def free_bytes(self) -> int:
        """Free RAM [B]; 0 if the step does not fit."""
        return max(0, self.ram_bytes - self.needed_bytes)

    @property
    def missing_bytes(self) -> int:
        """Missing RAM [B]; 0 if the step fits."""
        return max(0, self.needed_bytes - self.ram_bytes)


def device_ram_metrics(device_ram: DeviceRam | None) -> dict[str, Any]:
    """Return the metrics of `DEVICE_RAM_KEYS` and the gauge, by key; all None without a device."""
    values = dict.fromkeys(DEVICE_RAM_KEYS)
    if device_ram is not None:
        values |= zip(
            DEVICE_RAM_KEYS,
            (device_ram.resident_bytes, device_ram.ram_bytes, device_ram.fits),
            strict=True,
        )
    return values | {GAUGE_KEY: make_gauge(device_ram)}


KIND_NAMES: Final = ("state", "activations", "gradients", "workspace")
"""Display names of the kinds of RAM use, in the order of the fields of `RamUse`."""


def make_gauge(device_ram: DeviceRam | None) -> dict[str, Any] | None:
    """Return the device gauge for JSON; None without a device, or if the kinds are unknown.

    The RAM use includes resident bytes, even if the RAM budget excludes them.
    """
    if device_ram is None or device_ram.use is None:
        return None
    return {
        "ram_bytes": device_ram.ram_bytes,
        **asdict(device_ram.use),
        "free_bytes": device_ram.free_bytes,
        "missing_bytes": device_ram.missing_bytes,
        "trains": device_ram.fits,
    }


def gauge_by_json_path(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a gauge by JSON path; {} without a gauge."""
    return {f"{GAUGE_KEY}.{key}": value for key, value in (values or {}).items()}
