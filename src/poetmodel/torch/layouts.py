"""Layouts: a capture sees the strides of PyTorch's kernels, not predicted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.torch.constants import real_constants, remember
from poetmodel.torch.failures import RAISED
from poetmodel.torch.measures import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._subclasses import FakeTensorMode


def fake_mode(*, mkldnn: bool) -> FakeTensorMode:
    """Return a mode whose fake tensors lie in memory as the real ones do.

    Parameters
    ----------
    mkldnn : bool
        Whether kernels of oneDNN are on when the step runs.

    Notes
    -----
    A fake tensor has the strides that a prediction of the kernel says, and some predictions are
    wrong: the real ``mse_loss_backward`` is contiguous whatever its inputs are. Whoever asks for a
    ``view`` or ``contiguous()`` then gets an answer that holds for the fake tensor alone: a view
    that cannot be made of the real one, or one copy more or less than eager makes, which changes
    the order of sums. So each new form of a call runs once on zeros that lie as its inputs do, and
    its outputs are given the strides that come out. An operation that fails on zeros keeps the
    predicted ones. Values that depend on nothing but the code are known, and may be read.
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    # No subclass: PyTorch finds the rules of some operators by the very type of the mode.
    mode.dispatch = _RealStrides(mode, mkldnn=mkldnn)
    return mode


class _RealStrides:
    """What a fake mode calls for an operation: its own work, and the outputs then corrected."""

    def __init__(self, mode: FakeTensorMode, *, mkldnn: bool) -> None:
        self._mode = mode
        self._predict = mode.dispatch
        self._mkldnn = mkldnn
        self._depth = 0
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch
        from torch._ops import OpOverload

        keywords = kwargs or {}
        if not isinstance(func, OpOverload):
            return self._predict(func, types, args, keywords)
        reads = torch.Tag.data_dependent_output in func.tags
        shapes = torch.Tag.dynamic_output_shape in func.tags
        inner = self._depth > 0
        constants = real_constants(func, args, keywords) if reads or shapes or not inner else None
        if constants is not None and reads:
            return constants
        if constants is not None and shapes:
            return self._of(constants)
        self._depth += 1
        try:
            value = self._predict(func, types, args, keywords)
        finally:
            self._depth -= 1
        if self._depth:  # what an operation is made of inside is its own affair
            return value
        value = self._corrected(func, args, keywords, value)
        remember(value, constants)
        return value

    def _of(self, constants: Any) -> Any:
        """Return fake tensors of the form of real ones, which hold their values."""
        import torch
        from torch.utils import _pytree

        def fake(real: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)

        with self._mode:
            value = _pytree.tree_map_only(torch.Tensor, fake, constants)
        remember(value, constants)
        return value

    def _corrected(self, func: Any, args: Any, keywords: Any, value: Any) -> Any:
        """Return the outputs with the strides of real ones."""
        import torch
        from torch.utils import _pytree

        leaves, spec = _pytree.tree_flatten(value)
        inputs = tensors_in((args, keywords))
        if any(tensor.layout != torch.strided for tensor in inputs):
            return value
        there = {storage_key(tensor) for tensor in inputs}
        new = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and leaf.dim() > 1
            and leaf.device.type == "cpu"
            and leaf.layout == torch.strided
            and getattr(leaf, "constant", None) is None
            and storage_key(leaf) not in there
        ]
        if not new:
            return value
        forms = self._forms(func, args, keywords)
        if forms is None or len(forms) != len(leaves):
            return value
        for place in new:
            fake, form = leaves[place], forms[place]
            if form is not None and fake.shape == form[0] and fake.stride() != form[1]:
                with self._mode:
                    leaves[place] = torch.empty_strided(*form, dtype=fake.dtype, device=fake.device)
        return _pytree.tree_unflatten(leaves, spec)

    def _forms(self, func: Any, args: Any, keywords: Any) -> Sequence[Any] | None:
        """Return shape and strides of each output of a real call; None where none can be had."""
        from torch.utils import _pytree

        leaves, spec = _pytree.tree_flatten((args, keywords))
        key = (func, spec, tuple(map(_form, leaves)))
        try:
            if key not in self._known:
                self._known[key] = _real_forms(func, leaves, spec, mkldnn=self._mkldnn)
        except TypeError:  # an argument that cannot be a part of a key
            return None
        found: Sequence[Any] | None = self._known[key]
        return found


def _form(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _real_forms(
    func: Any, leaves: Sequence[Any], spec: Any, *, mkldnn: bool
) -> Sequence[Any] | None:
    """Run an operation on zeros; return shape and strides of each output."""
    import torch
    from torch.utils import _pytree
    from torch.utils._mode_utils import no_dispatch

    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    state = torch.get_rng_state()
    before = torch.backends.mkldnn.enabled
    with no_dispatch(), torch.no_grad():
        try:
            torch.backends.mkldnn.enabled = mkldnn
            args, keywords = _pytree.tree_unflatten([_zeros(leaf) for leaf in leaves], spec)
            outputs = _pytree.tree_leaves(func(*args, **keywords))
        except RAISED:
            return None
        finally:
            torch.backends.mkldnn.enabled = before
            torch.set_rng_state(state)
    return [
        (output.shape, output.stride()) if isinstance(output, torch.Tensor) else None
        for output in outputs
    ]


def _zeros(leaf: Any) -> Any:
    """Return zeros that lie as a fake tensor does; anything else as it is."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    reach = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    whole = torch.zeros(reach + 1 if leaf.numel() else 0, dtype=leaf.dtype)
    return whole.as_strided(leaf.shape, leaf.stride())
