"""Names of state: the parameters, buffers and moments that a step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from poetmodel.torch.capturing.joint_graph import InputKind, format_path
from poetmodel.torch.step.optimizers import OptimizerMoment

if TYPE_CHECKING:
    from poetmodel.torch.capturing.joint_graph import InputSpec, Joint
    from poetmodel.torch.graph.step_graph import StepGraph

_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.MOMENT)


class StateKey(NamedTuple):
    """The name of a state tensor, equal for all input shapes, in files and in all processes."""

    kind: str
    """``parameter``, ``buffer`` or ``moment``."""
    owner: str
    """Path of the parameter or buffer below the captured module; for a moment, of its parameter."""
    moment: str = ""
    """Key of a moment in ``optimizer.state``."""

    @property
    def name(self) -> str:
        """Name for display."""
        return ".".join(filter(None, (format_path(self.owner), self.moment)))


def find_state(joint: Joint, step_graph: StepGraph) -> dict[int, tuple[StateKey, InputSpec]]:
    """Return key and first argument of each state storage, by its index; constants have no key."""
    first_paths: dict[int, str] = {}
    state: dict[int, tuple[StateKey, InputSpec]] = {}
    for argument in joint.arguments:
        if argument.kind not in _STATE_KINDS or argument.node not in step_graph.output_keys:
            continue
        source = argument.optimizer_value
        if isinstance(source, OptimizerMoment):
            owner = first_paths[id(source.parameter)]
            key = StateKey(str(argument.kind), owner, source.key)
        else:
            first_paths.setdefault(id(joint.value(argument)), argument.target)
            key = StateKey(str(argument.kind), argument.target)
        index, _ = step_graph.output_keys[argument.node]
        if step_graph.storages[index].bytes:
            state.setdefault(index, (key, argument))
    return state
