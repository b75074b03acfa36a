"""Ways to train whose state has its place in a file: small baselines after what others offer.

`moments_offloaded` is after DeepSpeed's ZeRO-Offload and ZeRO-Infinity (Ren et al., 2021;
Rajbhandari et al., 2021), `parameters_offloaded` after the CPU offload of PyTorch's FSDP (Zhao et
al., 2023), each in one process, with a file in place of the other memory. As in compiled steps, a
write ends when the medium has the bytes, and the copy in the file cache is dropped.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.state.pages import bytes_of
from pytorch.networks import Block
from pytorch.peers import SMALL_BYTES, TrainingMethod, eager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from pytorch.networks import Training

_ALIGNMENT_BYTES: Final = 4096
_WRITES_BEHIND: Final = 1
"""How many updated parameters may wait for their writes."""


class Homes:
    """Tensors whose place is a file. Away, they have a storage of no bytes.

    One thread moves them, in the order in which they are asked for. Small tensors stay.
    """

    def __init__(self, folder: str) -> None:
        self._descriptor, path = tempfile.mkstemp(dir=folder)
        Path(path).unlink()
        weakref.finalize(self, os.close, self._descriptor)
        self._offsets: dict[object, int] = {}
        self._end = 0
        self._sizes: dict[object, int] = {}
        self._thread = ThreadPoolExecutor(1)
        self.written_bytes = 0

    def put(self, tensors: dict[object, torch.Tensor], *, changed: bool = True) -> Future[None]:
        """Write tensors, where they were changed, and take them out of memory."""
        return self._thread.submit(self._put, tensors, changed)

    def get(self, tensors: dict[object, torch.Tensor]) -> Future[None]:
        """Read tensors back that are away."""
        return self._thread.submit(self._get, tensors)

    def _put(self, tensors: dict[object, torch.Tensor], changed: bool) -> None:  # noqa: FBT001 - of a thread
        for key, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALL_BYTES:
                continue
            if changed:
                self._write(key, storage)
            storage.resize_(0)

    def _write(self, key: object, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if key not in self._offsets:
            self._offsets[key], self._sizes[key] = self._end, size
            self._end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        os.pwrite(self._descriptor, bytes_of(storage), self._offsets[key])
        os.fdatasync(self._descriptor)
        self._drop(key)
        self.written_bytes += size

    def _get(self, tensors: dict[object, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if key not in self._offsets or storage.nbytes():
                continue
            storage.resize_(self._sizes[key])
            if (
                os.preadv(self._descriptor, [bytes_of(storage)], self._offsets[key])
                != (self._sizes[key])
            ):
                msg = "a home could not be read"
                raise OSError(msg)
            self._drop(key)

    def _drop(self, key: object) -> None:
        os.posix_fadvise(
            self._descriptor, self._offsets[key], self._sizes[key], os.POSIX_FADV_DONTNEED
        )


# -- optimizers ------------------------------------------------------------------------------------


class Optimizers:
    """An optimizer for each parameter, so that each is updated at a time of its own."""

    def __init__(
        self, model: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._of = {parameter: make([parameter]) for parameter in self.parameters}

    def update(self, parameter: torch.Tensor) -> None:
        """Update a parameter; its gradient is gone then."""
        self._of[parameter].step()
        parameter.grad = None

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the optimizer holds for a parameter, by the optimizer's names."""
        return dict(self._of[parameter].state.get(parameter, {}))

    def keyed(self, parameter: torch.Tensor) -> dict[object, torch.Tensor]:
        """Return the same by keys that no other parameter has."""
        return {(parameter, name): tensor for name, tensor in self.moments(parameter).items()}


def streamed(
    optimizers: Optimizers,
    homes: Homes,
    read: Callable[[torch.Tensor], dict[object, torch.Tensor]],
    written: Callable[[torch.Tensor], dict[object, torch.Tensor]],
) -> None:
    """Update every parameter: the next one's state is read, the last one's written beside it."""
    parameters = optimizers.parameters
    ahead = [homes.get(read(parameter)) for parameter in parameters[:1]]
    behind: deque[Future[None]] = deque()
    for place, parameter in enumerate(parameters):
        ahead.pop().result()
        ahead += [homes.get(read(following)) for following in parameters[place + 1 : place + 2]]
        optimizers.update(parameter)
        behind.append(homes.put(written(parameter)))
        while len(behind) > _WRITES_BEHIND:
            behind.popleft().result()
    for write in behind:
        write.result()


def in_backward(training: Training, make: Callable[[Any], torch.optim.Optimizer]) -> TrainingMethod:
    """Update each parameter as soon as its gradient is there, which then goes."""
    optimizers = Optimizers(training[0], make)
    for parameter in optimizers.parameters:
        parameter.register_post_accumulate_grad_hook(optimizers.update)
    return replace(eager(training), moments=optimizers.moments)


def moments_offloaded(
    training: Training, make: Callable[[Any], torch.optim.Optimizer], folder: str
) -> TrainingMethod:
    """Keep parameters and gradients in memory; stream moments through it for the updates."""
    model, homes = training[0], Homes(folder)
    optimizers = Optimizers(model, make)
    learn = eager(training).run

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = learn(x, y)
        streamed(optimizers, homes, optimizers.keyed, optimizers.keyed)
        return loss

    return TrainingMethod(
        run=run,
        written_bytes=lambda: homes.written_bytes,
        moments=optimizers.moments,
        fetch=lambda parameter: homes.get(optimizers.keyed(parameter)).result(),
    )


# -- parameters ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Group:
    """The parameters of a block, which come and go together."""

    parameters: dict[object, torch.Tensor]
    waiting: int = 0
    """How many of their gradients are not there yet."""
    neighbours: dict[bool, _Group] = field(default_factory=dict)
    """The group that is likely to come next: in the backward pass, and in the forward pass."""


class _Offloaded:
    """The groups of a model, what is known about them, and when they come and go."""

    def __init__(self, model: torch.nn.Module, homes: Homes) -> None:
        self._homes = homes
        self.groups = []
        for module in _blocks(model):
            held = {p: p for p in module.parameters() if p.requires_grad}
            group = _Group(parameters=dict(held))
            self.groups.append(group)
            module.forward = partial(self._forward, group, module.forward)
            for parameter in held:
                parameter.register_post_accumulate_grad_hook(partial(self._learned, group))
        for one, other in zip(self.groups, self.groups[1:], strict=False):
            one.neighbours[False], other.neighbours[True] = other, one
        for group in self.groups:
            homes.put(group.parameters).result()

    def _forward(self, group: _Group, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        self._fetch(group, backward=False)
        y = forward(x)
        self._homes.put(group.parameters, changed=False)
        y.register_hook(partial(self._backward, group))
        return y

    def _backward(self, group: _Group, _: torch.Tensor) -> None:
        self._fetch(group, backward=True)
        group.waiting = len(group.parameters)

    def _fetch(self, group: _Group, *, backward: bool) -> None:
        here = self._homes.get(group.parameters)
        if backward in group.neighbours:
            self._homes.get(group.neighbours[backward].parameters)
        here.result()

    def _learned(self, group: _Group, _: torch.Tensor) -> None:
        group.waiting -= 1
        if not group.waiting:
            self._homes.put(group.parameters, changed=False)
            self._homes.put(_gradients(group.parameters.values()))


def parameters_offloaded(
    training: Training, make: Callable[[Any], torch.optim.Optimizer], folder: str
) -> TrainingMethod:
    """Fetch the parameters of each block for its passes, the next block's beside its work.

    Gradients go to the file; parameters, gradients and moments are streamed for the updates.
    """
    model, homes = training[0], Homes(folder)
    optimizers = Optimizers(model, make)
    _Offloaded(model, homes)
    learn = eager(training).run

    def written(parameter: torch.Tensor) -> dict[object, torch.Tensor]:
        return {parameter: parameter, **optimizers.keyed(parameter)}

    def read(parameter: torch.Tensor) -> dict[object, torch.Tensor]:
        return written(parameter) | _gradients([parameter])

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = learn(x, y)
        streamed(optimizers, homes, read, written)
        return loss

    return TrainingMethod(
        run=run,
        written_bytes=lambda: homes.written_bytes,
        moments=optimizers.moments,
        fetch=lambda parameter: homes.get(written(parameter)).result(),
    )


def _blocks(model: torch.nn.Module) -> Sequence[Any]:
    """Return blocks, and modules with parameters of their own outside of any."""
    inside = {m for b in model.modules() if isinstance(b, Block) for m in b.modules()}
    return [
        module
        for module in model.modules()
        if isinstance(module, Block)
        or (module not in inside and any(True for _ in module.parameters(recurse=False)))
    ]


def _gradients(parameters: Iterable[torch.Tensor]) -> dict[object, torch.Tensor]:
    return {(p, "gradient"): p.grad for p in parameters if p.grad is not None}
