"""Operators that work element by element."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from poetmodel.errors import InputError
from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import MASK_BYTES, Value

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activation:
    """FLOP per element forward and backward, and which of its tensors the backward reads."""

    forward: int
    backward: int
    saves: Literal["input", "output"]


_ACTIVATIONS: Final[Mapping[str, _Activation]] = MappingProxyType(
    {
        "relu": _Activation(forward=1, backward=1, saves="output"),
        "relu6": _Activation(forward=2, backward=2, saves="output"),
        "tanh": _Activation(forward=1, backward=3, saves="output"),
        # x / 2 * (1 + erf(x / sqrt 2)); backward: Phi(x) 4, x * phi(x) 5, sum and product 2
        "gelu": _Activation(forward=5, backward=11, saves="input"),
    }
)


def activation(name: str, x: Value, *, kind: str) -> Declaration:
    """Declare an activation function: ``relu``, ``relu6``, ``tanh`` or ``gelu``.

    The backward of GELU reads the function's input; the others read their result, which the next
    layer keeps anyway. Nothing is computed in place.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value
        Input of any shape.
    kind : str
        Which function.
    """
    if kind not in _ACTIVATIONS:
        msg = f"{name}: expected one of {', '.join(_ACTIVATIONS)}, got {kind!r}"
        raise InputError(msg)
    chosen = _ACTIVATIONS[kind]
    y = x.made(name, *x.shape)
    saved = x if chosen.saves == "input" else y
    return Declaration(
        name=name,
        op=kind,
        inputs=(x,),
        outputs=(y,),
        other_flops=chosen.forward * x.size,
        gradients=(Gradient(part="input", of=x, saved=(saved,), flops=chosen.backward * x.size),),
    )


def add(name: str, *terms: Value) -> Declaration:
    """Declare a sum, such as that of a residual connection.

    Its backward reads nothing and computes nothing: the arriving gradient *is* the gradient of
    every term, so it is passed on without a node or a copy. Only for a term that lacks leading
    dimensions of the first (it is repeated along them) a node sums the gradient over them.

    Parameters
    ----------
    name : str
        Of the node.
    *terms : Value
        Two or more; the first has the shape of the result.
    """
    first = terms[0]
    for term in terms[1:]:
        if term.shape != first.shape[len(first.shape) - len(term.shape) :]:
            msg = f"{name}: shapes {first.shape} and {term.shape} cannot be added"
            raise InputError(msg)
    repeated = [k for k, term in enumerate(terms) if term.shape != first.shape]
    return Declaration(
        name=name,
        op="add",
        inputs=terms,
        outputs=(first.made(name, *first.shape),),
        other_flops=(len(terms) - 1) * first.size,
        gradients=tuple(
            Gradient(part=f"input{k}", of=terms[k], flops=first.size) for k in repeated
        ),
        passes=tuple(term for k, term in enumerate(terms) if k not in repeated),
    )


def scale(name: str, x: Value) -> Declaration:
    """Declare a product with a constant; its backward reads only the arriving gradient.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value
        Input of any shape.
    """
    return Declaration(
        name=name,
        op="scale",
        inputs=(x,),
        outputs=(x.made(name, *x.shape),),
        other_flops=x.size,
        gradients=(Gradient(part="input", of=x, flops=x.size),),
    )


def dropout_mask(name: str, x: Value) -> Declaration:
    """Declare the drawing of a dropout mask; see `dropout`.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value
        Gives the shape; it is not read.
    """
    return Declaration(
        name=name,
        op="dropout_mask",
        outputs=(x.made(name, *x.shape, item_bytes=MASK_BYTES),),
        other_flops=x.size,
        recomputable=False,
    )


def dropout(name: str, x: Value, mask: Value) -> Declaration:
    """Declare dropout: the input where the mask says so, scaled up, and zero elsewhere.

    The rule: a mask is drawn once. Drawn again it would be another one, and the gradient would
    not be that of the loss; so `dropout_mask` is not recomputable, and its mask (1 byte per
    element) is kept or paged until the backward has read it. Applying a mask gives the same every
    time, so this node, whose result is larger, may be recomputed. As one node with two outputs
    neither could be.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value
        Input of any shape.
    mask : Value
        Result of `dropout_mask`.
    """
    return Declaration(
        name=name,
        op="dropout",
        inputs=(x, mask),
        outputs=(x.made(name, *x.shape),),
        other_flops=2 * x.size,
        gradients=(Gradient(part="input", of=x, saved=(mask,), flops=2 * x.size),),
    )
