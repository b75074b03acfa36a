"""Forms: the loops of kernels over their tensors, as data that is read and written.

A form states the size of each loop, and the strides of each tensor, as a term: a number, or a
product of arguments such as ``plane*out_step`` or ``count/in``. Reading a call evaluates the
terms. Writing solves them for the arguments that are `Form.free`, and refuses loops that
contradict each other or the other arguments, because the kernel cannot execute them. Kernels with
shape tables, which state loops themselves, have forms of their own.

A name in a term is a parameter, a field or property of `ConvolutionSizes` (``shape.plane``), an
item of a list (``steps[2]``), ``single`` (1 if planes have one element, else 0), or ``tap_step``
(the distance of the weights of one window in int8 depthwise layers). A loop of size 0 has only
strides: a kernel computes all of its iterations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.lowered.loops import Loops, make_shape_table, merge_dimensions, table_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poetmodel.lowered.calls import Argument, Call

Term: TypeAlias = "int | str"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(ABC):
    """Loops of a kernel."""

    is_general: bool = False
    """Whether the kernel accepts any offsets and sizes, and nearly any strides."""
    is_product: bool = False
    """Whether the kernel is a matrix product, a convolution, or a gradient of one."""
    sum: tuple[int, str] | None = None
    """The summed loop that can be divided, and the parameter that, if 1, adds to earlier sums."""

    @abstractmethod
    def read(self, call: Call) -> Loops | None:
        """Return the loops of a call; None if the form does not hold for its numbers."""

    @abstractmethod
    def write(self, loops: Loops) -> Call | None:
        """Return the call that executes loops; None if the kernel cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductForm(Form):
    """Loops whose sizes and strides are products of arguments."""

    sizes: tuple[Term, ...]
    strides: Mapping[str, tuple[Term, ...]]
    """Strides of each tensor for each loop, by parameter; parameters that a kernel lacks, too."""
    free: frozenset[str]
    """Names whose numbers follow from loops."""
    is_valid: Callable[[_Values], bool] = lambda _values: True
    """Whether the form holds for the numbers of a call."""
    derive: Callable[[_Values, Loops], Mapping[str, int]] = lambda _values, _loops: {}
    """Further numbers of the written call, from the solved numbers and those of the call."""
    is_merged: bool = False
    """Whether several loops can be written if they are one over contiguous elements."""

    def read(self, call: Call) -> Loops | None:
        """Return the loops of a call; None if the form does not hold for its numbers."""
        values = _Values(call.named_arguments)
        if not self.is_valid(values):
            return None
        pointers = call.pointers
        return Loops(
            call=call,
            sizes=tuple(_evaluate(term, values) for term in self.sizes),
            refs=tuple(pointers.values()),
            strides=tuple(
                tuple(_evaluate(term, values) for term in self.strides[name]) for name in pointers
            ),
        )

    def write(self, loops: Loops) -> Call | None:
        """Return the call that executes loops; None if the kernel cannot."""
        sizes, all_strides = loops.sizes, loops.strides
        if self.is_merged:
            rows = merge_dimensions((sizes, *all_strides)) or [[1] * (1 + len(all_strides))]
            sizes, *all_strides = zip(*rows, strict=True)  # type: ignore[assignment]
        if len(sizes) != len(self.sizes):
            return None
        values = _Values(loops.call.named_arguments)
        found: dict[str, int] = {}
        equations = list(zip(self.sizes, sizes, strict=True))
        free_equations: list[tuple[Term, int]] = []  # of loops of one iteration: any number will do
        for name, strides in zip(loops.call.pointers, all_strides, strict=True):
            for term, stride, size in zip(self.strides[name], strides, sizes, strict=True):
                (free_equations if size == 1 else equations).append((term, stride))
        if not all(_solve(term, number, values, self.free, found) for term, number in equations):
            return None
        for term, number in free_equations:
            trial = dict(found)
            if _solve(term, number, values, self.free, trial):
                found = trial
        found |= self.derive(_Values({**values, **found}), loops)
        return _with_numbers(loops, found)


class _Values(dict[str, Any]):
    """Numbers by the names that terms use; those of `ConvolutionSizes` and lists as needed."""

    def __getitem__(self, name: str) -> Any:
        """Return the number of a name in a term, such as ``shape.plane`` or ``steps[2]``."""
        if name in self:
            return super().__getitem__(name)
        if name.startswith("shape."):
            return getattr(ConvolutionSizes(*self["shape"]), name.removeprefix("shape."))
        if name == "single":
            return int(self["plane"] == 1)
        if name == "tap_step":
            return self["shape.filter"] or self["count"]
        list_name, _, index = name.partition("[")
        return self[list_name][int(index.removesuffix("]"))]


def _evaluate(term: Term, values: _Values) -> int:
    if isinstance(term, int):
        return term
    top, _, bottom = term.partition("/")
    number: int = prod(values[name] for name in top.split("*"))
    return number // prod(values[name] for name in bottom.split("*")) if bottom else number


def _solve(
    term: Term, number: int, values: _Values, free: frozenset[str], found: dict[str, int]
) -> bool:
    """Solve a term with value `number` for its free name; return whether that is possible.

    The solution is added to `found`, unless the term has no free name that is not found.
    """
    if isinstance(term, int):
        return term == number
    top, _, bottom = term.partition("/")
    names = top.split("*")
    number *= prod(values[name] for name in bottom.split("*")) if bottom else 1
    unknown = [name for name in names if name in free and name not in found]
    known: int = prod(found.get(name, values[name]) for name in names if name not in unknown)
    if not unknown:
        return number == known
    (name,) = unknown
    if number % known:
        return False
    found[name] = number // known
    return True


def _with_numbers(loops: Loops, numbers: Mapping[str, int]) -> Call:
    """Return `loops.call` with the pointers of loops, and numbers by the names of terms."""
    call = loops.call
    changes: dict[str, Argument] = {}
    sizes: dict[str, int] = {}
    for name, number in numbers.items():
        if name.startswith("shape."):
            sizes[name.removeprefix("shape.")] = number
        elif "[" in name:
            list_name, _, index = name.removesuffix("]").partition("[")
            items = list(changes.get(list_name, call[list_name]))
            items[int(index)] = number
            changes[list_name] = tuple(items)
        elif name in call:
            changes[name] = number
    if sizes:
        filter_step = sizes.pop("filter_step", None)
        shape = ConvolutionSizes(*call["shape"])._replace(**sizes)
        if filter_step is not None:
            is_dense = filter_step == shape.group_channels * shape.window
            shape = shape._replace(filter=0 if is_dense else filter_step)
        changes["shape"] = tuple(shape)
    return _with_refs(loops, changes)


def _with_refs(loops: Loops, changes: Mapping[str, Argument]) -> Call:
    refs = dict(zip(loops.call.pointers, loops.refs, strict=True))
    return loops.call.with_arguments(**refs, **changes)


# -- shape tables --------------------------------------------------------------------------------

MASK: Final = "bits"
"""The parameter that points to a mask of bits."""


class TableForm(Form):
    """Loops of the table ``shape``, with a column for each tensor but masks of bits."""

    def read(self, call: Call) -> Loops:
        """Return the loops of a call."""
        sizes, *columns = table_columns(call["shape"])
        for index, name in enumerate(call.pointers):
            if name == MASK:
                columns.insert(index, contiguous_strides(sizes))
        return Loops(call=call, sizes=sizes, refs=call.refs, strides=tuple(columns))

    def write(self, loops: Loops) -> Call | None:
        """Return the call that executes loops; None if the kernel cannot."""
        columns = dict(zip(loops.call.pointers, loops.strides, strict=True))
        dense = contiguous_strides(loops.sizes)
        bits = zip(loops.sizes, columns.pop(MASK, dense), dense, strict=True)
        if any(size > 1 and stride != dense_stride for size, stride, dense_stride in bits):
            return None
        table = make_shape_table((loops.sizes, *columns.values()))
        return None if table is None else _with_refs(loops, {"shape": table})


class SumForm(Form):
    """Loops over the results of the table ``outer``, then over the summed elements of ``inner``."""

    def read(self, call: Call) -> Loops:
        """Return the loops of a call."""
        sizes, out_strides, x_strides = table_columns(call["outer"])
        summed_sizes, summed_strides = table_columns(call["inner"])
        strides = (*out_strides, *(0 for _ in summed_sizes)), (*x_strides, *summed_strides)
        return Loops(call=call, sizes=(*sizes, *summed_sizes), refs=call.refs, strides=strides)

    def write(self, loops: Loops) -> Call | None:
        """Return the call that executes loops; None if the kernel cannot."""
        rows = list(zip(loops.sizes, *loops.strides, strict=True))
        outer_rows = [row for row in rows if row[1]]
        inner_rows = [(size, x_stride) for size, out_stride, x_stride in rows if not out_stride]
        outer = make_shape_table(tuple(zip(*outer_rows, strict=True)) or ((1,),) * 3)
        inner = make_shape_table(tuple(zip(*inner_rows, strict=True)) or ((1,),) * 2)
        if outer is None or inner is None:
            return None
        return _with_refs(loops, {"outer": outer, "inner": inner})


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of elements that are contiguous in the order of loops, innermost first."""
    return tuple(prod(sizes[:k]) for k in range(len(sizes)))


ELEMENTWISE: Final = TableForm(is_general=True)
BITS: Final = TableForm()
SUM: Final = SumForm(is_general=True)


def _make_form(
    sizes: Sequence[Term], free: str, strides: Mapping[str, tuple[Term, ...]], **facts: Any
) -> ProductForm:
    return ProductForm(sizes=tuple(sizes), free=frozenset(free.split()), strides=strides, **facts)


# -- elements and matrices -----------------------------------------------------------------------

FILL: Final = _make_form(("n",), "n", {"out": (1,)}, is_merged=True, is_general=True)
FILLED_ROWS: Final = _make_form(
    ("m", "n"), "m n out_row step", {"out": ("out_row", 1), "values": (0, "step")}, is_general=True
)
MATRIX_PRODUCT: Final = _make_form(
    ("m", "k", "n"),
    "m k n out_row a_row a_column b_row b_column",
    {"out": ("out_row", 0, 1), "a": ("a_row", "a_column", 0), "b": (0, "b_row", "b_column")},
    is_general=True,
    is_product=True,
    sum=(1, "accumulate"),
)
UPDATE: Final = _make_form(
    ("n",),
    "n",
    {
        **dict.fromkeys(("w", "gradient", "total", "mean", "square", "largest", "buffer"), (1,)),
        **dict.fromkeys(("steps", "product"), (0,)),  # numbers for all elements
    },
)

# -- planes --------------------------------------------------------------------------------------


def make_plane_form(*tensors: str, rank: int) -> ProductForm:
    """Return loops over batch, channels and a plane of `rank` dimensions.

    `tensors` are the parameters whose strides are in the list ``steps``, in this order.
    """
    width = 2 + rank
    strides: dict[str, tuple[Term, ...]] = {
        name: tuple(f"steps[{k * width + d}]" for d in range(width))
        for k, name in enumerate(tensors)
    }
    per_channel = dict.fromkeys(
        ("w", "bias", "mean", "inverse", "variance", "new_mean", "new_variance", "old_mean",
         "old_variance", "dw", "db"),
        (0, 1, *[0] * rank),
    )  # fmt: skip
    free = " ".join(str(name) for names in strides.values() for name in names)
    sizes: tuple[Term, ...] = ("batch", "channels", *[0] * rank)
    return _make_form(sizes, f"batch channels {free}", {**per_channel, **strides})


BIAS_GRADIENT: Final = _make_form(
    ("batch", "count", 0, 0),
    "batch count dy_step channel_step row_step column_step",
    {"db": (0, 1, 0, 0), "dy": ("dy_step", "channel_step", "row_step", "column_step")},
)

# -- convolutions: loops over batch, output channels, input channels, rows and columns -----------


def _is_whole(values: _Values) -> bool:
    """Return whether a call computes all output channels of a layer without groups."""
    is_complete = values["first"] == 0 and values["count"] == values["shape.results"]
    return is_complete and bool(values["shape.groups"] == 1)


def _is_whole_depthwise(values: _Values) -> bool:
    sizes = values["shape.groups"], values["shape.channels"], values["shape.results"]
    return values["first"] == 0 and {*sizes} == {values["count"]}


def _with_results(values: _Values, _loops: Loops) -> dict[str, int]:
    return {"shape.results": values["count"]}


def _with_channels(values: _Values, _loops: Loops) -> dict[str, int]:
    return dict.fromkeys(("shape.channels", "shape.results", "shape.groups"), values["count"])


def make_convolution_form(
    *tensors: str, out_step: str = "out_step", can_add: int | None = None
) -> ProductForm:
    """Return the loops of a convolution or its gradient with dense planes.

    `tensors` are its input, output and weights, or their gradients. `out_step` is the parameter
    for the batch stride of the output, `can_add` the summed loop that can be divided (`Form.sum`).
    """
    x, y, w = tensors
    strides: dict[str, tuple[Term, ...]] = {
        x: ("shape.channels*shape.plane", 0, "shape.plane", 0, 0),
        y: (out_step, "shape.out_plane", 0, 0, 0),
        w: (0, "shape.filter_step", "shape.window", 0, 0),
        "bias": (0, 1, 0, 0, 0),
    }
    return _make_form(
        ("batch", "count", "shape.channels", 0, 0),
        f"batch count shape.channels shape.filter_step {out_step}",
        strides,
        is_valid=_is_whole,
        derive=_with_results,
        is_product=True,
        sum=None if can_add is None else (can_add, "accumulate"),
    )


def make_depthwise_form(*tensors: str, out_step: str = "out_step") -> ProductForm:
    """Return the loops of a depthwise convolution or gradient; see `make_convolution_form`."""
    x, y, w = tensors
    strides: dict[str, tuple[Term, ...]] = {
        x: ("count*shape.plane", "shape.plane", 0, 0, 0),
        y: (out_step, "shape.out_plane", 0, 0, 0),
        w: (0, "shape.window", 0, 0, 0),
        "bias": (0, 1, 0, 0, 0),
    }
    return _make_form(
        ("batch", "count", 1, 0, 0),
        f"batch count {out_step}",
        strides,
        is_valid=_is_whole_depthwise,
        derive=lambda values, loops: {**_with_channels(values, loops), "shape.filter": 0},
    )


def make_strided_form(*tensors: str, can_add: int | None = None) -> ProductForm:
    """Return the loops of a convolution or its gradient; ``strides`` has four for each tensor."""
    strides: dict[str, tuple[Term, ...]] = {"bias": (0, 1, 0, 0, 0)}
    for k, name in enumerate(tensors):
        outer, inner, *plane = (f"strides[{4 * k + d}]" for d in range(4))
        if name in ("x", "dx"):
            strides[name] = (outer, 0, inner, *plane)
        elif name in ("out", "dy"):
            strides[name] = (outer, inner, 0, *plane)
        else:
            strides[name] = (0, outer, inner, *plane)
    items = " ".join(f"strides[{k}]" for k in range(12))
    return _make_form(
        ("batch", "count", "shape.channels", 0, 0),
        f"batch count shape.channels {items}",
        strides,
        is_valid=_is_whole,
        derive=lambda values, loops: {**_with_results(values, loops), "shape.filter": 0},
        is_product=True,
        sum=None if can_add is None else (can_add, "accumulate"),
    )


# -- int8: channels are the last dimension; the last loop is over pixels ---------------------------

_PER_CHANNEL: Final = ("start", "scale", "bias")
_FILTER: Final = "shape.channels*shape.window"


def _image(n_pixels: str, pixel_stride: str, *between: Term) -> tuple[Term, ...]:
    return f"{n_pixels}*{pixel_stride}", 1, *between, pixel_stride


def _is_ungrouped(values: _Values) -> bool:
    return bool(values["shape.groups"] == 1)


def _with_groups(values: _Values, loops: Loops) -> dict[str, int]:
    """Return groups of slices of channels, and the distance of the weights of one window."""
    count, tap_step = values["count"], values["shape.filter"] or loops.call["count"]
    return {"shape.groups": count, "shape.filter": 0 if tap_step == count else tap_step}


def _with_taps(values: _Values, _loops: Loops) -> dict[str, int]:
    """Return the values of `_with_groups`, for a solved distance; dense without weights."""
    count = values["count"]
    tap_step = values.get("tap_step", count)
    return {"shape.groups": count, "shape.filter": 0 if tap_step == count else tap_step}


Q8_POINTWISE: Final = _make_form(
    ("pixels", "results", "in"),
    "pixels results out_step",
    {
        "out": ("out_step", 1, 0),
        "x": ("in", 0, 1),
        "w": (0, "in", 1),
        **dict.fromkeys(_PER_CHANNEL, (0, 1, 0)),
    },
    is_product=True,
)
Q8_CONVOLUTION: Final = _make_form(
    ("batch", "count", "shape.channels", 0),
    "batch count shape.results",
    {
        "out": _image("shape.out_plane", "shape.results", 0),
        "x": ("shape.plane*shape.channels", 0, 1, "shape.channels"),
        "w": (0, _FILTER, 1, 0),
        **dict.fromkeys(_PER_CHANNEL, (0, 1, 0, 0)),
    },
    is_valid=_is_ungrouped,
    is_product=True,
)
Q8_DEPTHWISE: Final = _make_form(
    ("batch", "count", 0),
    "batch count shape.channels shape.results",
    {
        "out": _image("shape.out_plane", "shape.results"),
        "x": _image("shape.plane", "shape.channels"),
        **dict.fromkeys(("w", *_PER_CHANNEL), (0, 1, 0)),
    },
    derive=_with_groups,
)
Q8_POOL: Final = _make_form(
    ("batch", "channels", 0),
    "batch channels out_step x_step",
    {"out": _image("height*width", "out_step"), "x": _image("x_height*x_width", "x_step")},
)
Q8_ADD: Final = _make_form(("n",), "n", dict.fromkeys(("out", "a", "b"), (1,)), is_merged=True)
Q8_QUANTIZE: Final = _make_form(
    ("batch", "channels", "single"),
    "batch channels",
    {"out": _image("plane", "channels"), "x": ("channels*plane", "plane", 1)},
)
Q8_LOOKUP: Final = _make_form(
    ("batch", "channels", "single"),
    "batch channels image_step channel_step element_step",
    {
        "out": _image("plane", "channels"),
        "x": ("image_step", "channel_step", "element_step"),
        "table": (0, "table_step", 0),
    },
)
Q8_DEQUANTIZE: Final = _make_form(
    ("batch", "channels", "single"),
    "batch channels x_step",
    {"out": ("channels*plane", "plane", 1), "x": _image("plane", "x_step")},
)
Q8_POINTWISE_DX: Final = _make_form(
    ("pixels", "results", "channels"),
    "pixels results channels out_step gradient_step",
    {
        "out": ("out_step", 0, 1),
        "gradient": ("gradient_step", 1, 0),
        "w": (0, "in", 1),
        "scale": (0, 1, 0),
    },
    is_product=True,
    sum=(1, "adds"),
)
Q8_CONVOLUTION_DX: Final = _make_form(
    ("batch", "results", "channels", 0),
    "batch results channels out_step gradient_step",
    {
        "out": ("shape.plane*out_step", 0, 1, "out_step"),
        "gradient": _image("shape.out_plane", "gradient_step", 0),
        "w": (0, _FILTER, 1, 0),
        "scale": (0, 1, 0, 0),
    },
    is_valid=_is_ungrouped,
    is_product=True,
    sum=(1, "adds"),
)
Q8_POINTWISE_DW: Final = _make_form(
    ("pixels", "count/in", "in"),
    "pixels count results",
    {"out": (0, "in", 1), "gradient": ("results", 1, 0), "x": ("in", 0, 1)},
    is_product=True,
)
Q8_CONVOLUTION_DW: Final = _make_form(
    ("batch", f"count/{_FILTER}", "shape.channels", 0),
    "batch count shape.results",
    {
        "out": (0, _FILTER, 1, 0),
        "gradient": _image("shape.out_plane", "shape.results", 0),
        "x": ("shape.plane*shape.channels", 0, 1, "shape.channels"),
    },
    is_valid=_is_ungrouped,
    is_product=True,
)


def make_channel_gradient_form(**tensors: str) -> ProductForm:
    """Return the loops of a gradient of an int8 depthwise layer or pool.

    They are over batch, channels, window and pixels. `tensors` maps to ``weights``, ``input``,
    ``output``, or the parameter with the stride of pixels: ``x_step`` (input), ``y_step`` (output).
    """
    strides_by_kind: dict[str, tuple[Term, ...]] = {
        "weights": (0, 1, "tap_step", 0),
        "input": _image("shape.plane", "shape.channels", 0),
        "output": _image("shape.out_plane", "shape.results", 0),
        "x_step": _image("shape.plane", "x_step", 0),
        "y_step": _image("shape.out_plane", "y_step", 0),
    }
    strides = {name: strides_by_kind[kind] for name, kind in tensors.items()}
    return _make_form(
        ("batch", "count", "shape.window", 0),
        "batch count shape.channels shape.results x_step y_step tap_step",
        {**strides, "scale": (0, 1, 0, 0)},
        derive=_with_taps,
    )


Q8_DEPTHWISE_DW: Final = make_channel_gradient_form(out="weights", gradient="output", x="input")
Q8_WEIGHT_SUMS: Final = _make_form(
    ("n", "terms"), "n terms next step", {"out": (1, 0), "w": ("next", "step")}
)


def _is_whole_update(values: _Values) -> bool:
    """Return whether an update is of all weights, and these are not channels-last (depthwise)."""
    is_complete = values["results"] * values["inner"] == values["count"]
    return is_complete and not values["first"]


def _with_place(values: _Values, loops: Loops) -> dict[str, int]:
    """Return the number of updated weights, and that of weights before them."""
    inner = values["inner"]
    moved_rows = loops.refs[loops.index_of("scale")].offset - loops.call["scale"].offset
    place = {"before": values["before"] + moved_rows * inner} if "before" in values else {}
    return {"count": values["results"] * inner, **place}


Q8_UPDATE: Final = _make_form(
    ("results", "inner"),
    "results",
    {**dict.fromkeys(("w", "residual", "gradient"), ("inner", 1)), "scale": (1, 0)},
    is_valid=_is_whole_update,
    derive=_with_place,
)
