"""One row for each kernel: what its C prototype does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from poetmodel.lowered import forms, work
from poetmodel.lowered.kernels import find_kernel

if TYPE_CHECKING:
    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.forms import Form
    from poetmodel.lowered.loops import Loops

Work: TypeAlias = Callable[[Counter[str], Mapping[str, Any]], None]
"""Counter of units: adds those of a call to the counts; receives its arguments by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A gradient whose slope has two values, selected by a comparison of ``x``, as two calls.

    A number is stated, or the parameter of the gradient that has it.
    """

    mask: str
    """The kernel that compares, and writes one bit per element."""
    limits: Mapping[str, float | str]
    """Its numbers: bounds, and the bit for NaN."""
    apply: str = "pm_bits_scale"
    """The kernel that applies the bits to the incoming gradient."""
    factor: Mapping[str, float | str] = field(default_factory=lambda: {"factor": 1.0})
    """The number by which it multiplies: `factor` if the bit is 1, `slope` if it is 0."""
    activation: str | None = None
    """The kernel whose output may replace ``x``, with numbers of the same names; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Facts about a kernel."""

    form: Form | None
    """The loops of a call; None for kernels whose calls cannot be divided."""
    work: Work
    """Counter of the repeated units of a call."""
    index: str | None = None
    """The parameter that points to indices, such as labels; None for kernels without indices."""
    fuses: tuple[str, str] | None = None
    """The kernels of a gradient and of the update by it, both of which a call replaces; else None.

    Its parameters have the names of theirs, except ``w_row`` for ``out_row``, and ``x_step``, the
    stride of the input from one sample to the next."""
    slope: Slope | None = None
    """How a mask can replace ``x`` in the gradient of an activation; else None."""
    begins_as_nan: str | None = None
    """The parameter that points to state which is all NaN before the first step; else None."""


_ELEMENTWISE: Final = """
    pm_abs pm_add pm_addcdiv pm_addcmul pm_affine pm_binary_cross_entropy_backward pm_byte_to_int
    pm_byte_to_real pm_ceil pm_clamp pm_copy pm_copy_byte pm_copy_int pm_copy_int8 pm_cos pm_cube
    pm_div pm_div_by pm_elu pm_erf pm_exp pm_expm1 pm_floor pm_gelu pm_gelu_backward pm_gelu_tanh
    pm_gelu_tanh_backward pm_glu pm_glu_gate_backward pm_hardshrink pm_hardsigmoid pm_hardswish
    pm_hardswish_backward pm_huber_loss_backward pm_int_to_byte pm_int_to_real pm_leaky_relu pm_lerp
    pm_log pm_log1p pm_log_sigmoid pm_log_sigmoid_backward pm_lookup pm_mask_scale pm_masked_fill
    pm_maximum pm_minimum pm_mish pm_mish_backward pm_mse_loss_backward pm_mul pm_mul_int pm_pow
    pm_prelu pm_prelu_backward pm_prelu_slope_backward pm_q8_mask pm_real_to_byte pm_real_to_int
    pm_reciprocal pm_round pm_rsqrt pm_shrink_backward pm_sigmoid pm_sigmoid_backward pm_sign
    pm_silu pm_silu_backward pm_sin pm_smooth_l1_loss_backward pm_softplus pm_softplus_backward
    pm_softshrink pm_sqrt pm_tanh pm_tanh_backward pm_threshold pm_where pm_where_byte pm_where_int
    pm_xlogy
"""
_REDUCTIONS: Final = """
    pm_amax pm_any pm_argmax pm_binary_cross_entropy pm_binary_cross_entropy_with_logits pm_cumsum
    pm_huber_loss pm_log_softmax pm_log_softmax_backward pm_logsumexp pm_mse_loss pm_norm pm_norm_of
    pm_prod pm_smooth_l1_loss pm_softmax pm_softmax_backward pm_sum_int pm_triangle pm_triangle_byte
    pm_var
"""
_UPDATES: Final = """
    pm_accumulate pm_adagrad pm_adam pm_adamax pm_amsgrad pm_nadam pm_radam pm_rmsprop
    pm_rmsprop_centered pm_rmsprop_momentum pm_rmsprop_momentum_centered pm_sgd
"""


def _make_rows(names: str, form: Form | None, counter: Work, **facts: Any) -> dict[str, Row]:
    return {name: Row(form=form, work=counter, **facts) for name in names.split()}


def _fuse(gradient: str, form: Form, counter: Work, *updates: str) -> dict[str, Row]:
    """Return the rows of a gradient kernel and of the kernels that also update: ``KERNEL_sgd``."""
    fused = {
        f"{gradient}_{update.rpartition('_')[2]}": Row(
            form=None, work=counter, fuses=(gradient, update)
        )
        for update in updates
    }
    return {gradient: Row(form=form, work=counter), **fused}


_SLOPES: Final = {
    "pm_threshold_backward": Slope(
        mask="pm_above_bits", limits={"number": "threshold", "unordered": 1}
    ),
    "pm_leaky_relu_backward": Slope(
        mask="pm_above_bits",
        limits={"number": 0.0, "unordered": 0},
        apply="pm_bits_slope",
        factor={"slope": "slope"},
        activation="pm_leaky_relu",
    ),
    "pm_hardtanh_backward": Slope(
        mask="pm_between_bits",
        limits={"low": "low", "high": "high", "unordered": 1},
        activation="pm_clamp",
    ),
    "pm_hardsigmoid_backward": Slope(
        mask="pm_between_bits",
        limits={"low": -3.0, "high": 3.0, "unordered": 0},
        factor={"factor": 0.1666666716337204},  # 1/6 as a float
    ),
}
_INT8_UPDATES: Final = ("pm_q8_sgd", "pm_q8_stochastic")

CATALOGUE: Final[Mapping[str, Row]] = {
    # elements
    **_make_rows(_ELEMENTWISE, forms.ELEMENTWISE, work.count_elements),
    **{
        name: Row(form=forms.ELEMENTWISE, work=work.count_elements, slope=slope)
        for name, slope in _SLOPES.items()
    },
    **_make_rows(
        "pm_above_bits pm_between_bits pm_bits_scale pm_bits_slope",
        forms.BITS,
        work.count_elements,
    ),
    **_make_rows(
        "pm_add_index pm_gather pm_gather_int pm_scatter pm_scatter_add pm_within",
        None,
        work.count_elements,
        index="index",
    ),
    **_make_rows("pm_nll_loss pm_nll_loss_backward", None, work.count_elements, index="target"),
    **_make_rows(
        """pm_add_int pm_affine_int pm_compare pm_compare_int pm_compare_int_to pm_compare_to
        pm_dropout pm_elu_backward pm_logical pm_square_sum""",
        None,
        work.count_elements,
    ),
    **_make_rows(_REDUCTIONS, None, work.count_reduction),
    "pm_sum": Row(form=forms.SUM, work=work.count_reduction),
    "pm_fill": Row(form=forms.FILL, work=work.count_sequence),
    "pm_fill_rows": Row(form=forms.FILLED_ROWS, work=work.count_rows),
    **_make_rows(_UPDATES, forms.UPDATE, work.count_sequence),
    **_make_rows("pm_momentum", forms.UPDATE, work.count_sequence, begins_as_nan="buffer"),
    **_make_rows(
        """pm_add_one pm_arange pm_arange_int pm_bernoulli pm_dropout_bits pm_fill_byte
        pm_fill_int pm_finite pm_nadam_count pm_normal pm_uniform""",
        None,
        work.count_sequence,
    ),
    **_make_rows("pm_clip_factor pm_count_to", None, work.count_single),
    # products, distances, embeddings
    **_fuse("pm_mm", forms.MATRIX_PRODUCT, work.count_product, "pm_sgd"),
    "pm_bmm": Row(form=None, work=work.count_product),
    **_make_rows("pm_cdist pm_cdist_backward", None, work.count_distances),
    **_make_rows(
        "pm_embedding_bag pm_embedding_bag_backward", None, work.count_bags, index="index"
    ),
    # convolutions
    "pm_conv2d": Row(
        form=forms.make_convolution_form("x", "out", "w", can_add=2), work=work.count_convolution
    ),
    "pm_conv2d_dx": Row(
        form=forms.make_convolution_form("dx", "dy", "w", out_step="dy_step", can_add=1),
        work=work.count_input_gradient,
    ),
    **_fuse(
        "pm_conv2d_dw",
        forms.make_convolution_form("x", "dy", "dw", out_step="dy_step"),
        work.count_weight_gradient,
        "pm_sgd",
    ),
    "pm_depthwise": Row(form=forms.make_depthwise_form("x", "out", "w"), work=work.count_depthwise),
    "pm_depthwise_dx": Row(
        form=forms.make_depthwise_form("dx", "dy", "w", out_step="dy_step"),
        work=work.count_depthwise,
    ),
    **_fuse(
        "pm_depthwise_dw",
        forms.make_depthwise_form("x", "dy", "dw", out_step="dy_step"),
        work.count_depthwise,
        "pm_sgd",
    ),
    "pm_conv2d_strided": Row(
        form=forms.make_strided_form("out", "x", "w"), work=work.count_strided_convolution
    ),
    "pm_conv2d_dx_strided": Row(
        form=forms.make_strided_form("dx", "dy", "w", can_add=1),
        work=work.count_strided_convolution,
    ),
    "pm_conv2d_dw_strided": Row(
        form=forms.make_strided_form("dw", "x", "dy"), work=work.count_strided_convolution
    ),
    "pm_conv2d_db": Row(form=forms.BIAS_GRADIENT, work=work.count_planes),
    # planes and vectors
    **{
        name: Row(form=forms.make_plane_form(*tensors, rank=rank), work=work.count_planes)
        for name, rank, tensors in (
            ("pm_batch_norm", 1, ("out", "x")),
            ("pm_batch_norm_backward", 1, ("dx", "dy", "x")),
            ("pm_batch_norm_fixed", 1, ("out", "x")),
            ("pm_batch_norm_fixed_backward", 1, ("dx", "dy")),
            ("pm_mean_pool2d", 2, ("out", "x")),
            ("pm_mean_pool2d_backward", 2, ("dx", "dy")),
            ("pm_max_pool2d", 2, ("out", "indices", "x")),
            ("pm_max_pool2d_backward", 2, ("dx", "dy", "indices")),
            ("pm_max_pool2d_places", 2, ("out", "places", "x")),
            ("pm_max_pool2d_places_backward", 2, ("dx", "dy", "places")),
            ("pm_pick2d", 2, ("out", "x")),
            ("pm_pick2d_backward", 2, ("dx", "dy")),
            ("pm_bilinear2d", 2, ("out", "x")),
            ("pm_bilinear2d_backward", 2, ("dx", "dy")),
        )
    },
    **_make_rows("pm_group_norm pm_group_norm_dw pm_group_norm_dx", None, work.count_planes),
    **_make_rows("pm_layer_norm pm_layer_norm_dw pm_layer_norm_dx", None, work.count_vectors),
    # int8
    "pm_q8_pointwise": Row(form=forms.Q8_POINTWISE, work=work.count_q8_pointwise),
    "pm_q8_conv2d": Row(form=forms.Q8_CONVOLUTION, work=work.count_q8_convolution),
    "pm_q8_depthwise": Row(form=forms.Q8_DEPTHWISE, work=work.count_q8_depthwise_convolution),
    "pm_q8_add": Row(form=forms.Q8_ADD, work=work.count_q8_elements),
    **_make_rows("pm_q8_average pm_q8_maximum", forms.Q8_POOL, work.count_q8_pool),
    "pm_q8_quantize": Row(form=forms.Q8_QUANTIZE, work=work.count_planes),
    "pm_q8_lookup": Row(form=forms.Q8_LOOKUP, work=work.count_planes),
    "pm_q8_dequantize": Row(form=forms.Q8_DEQUANTIZE, work=work.count_planes),
    "pm_q8_start": Row(form=forms.Q8_WEIGHT_SUMS, work=work.count_q8_sums),
    **_make_rows("pm_q8_sgd pm_q8_stochastic", forms.Q8_UPDATE, work.count_q8_update),
    "pm_q8_pointwise_dx": Row(form=forms.Q8_POINTWISE_DX, work=work.count_q8_pointwise_dx),
    "pm_q8_conv2d_dx": Row(form=forms.Q8_CONVOLUTION_DX, work=work.count_q8_convolution_dx),
    "pm_q8_depthwise_dx": Row(
        form=forms.make_channel_gradient_form(out="input", gradient="output", w="weights"),
        work=work.count_q8_depthwise_dx,
    ),
    "pm_q8_average_dx": Row(
        form=forms.make_channel_gradient_form(out="input", gradient="output"),
        work=work.count_q8_pool_dx,
    ),
    "pm_q8_maximum_dx": Row(
        form=forms.make_channel_gradient_form(
            out="input", gradient="output", x="x_step", y="y_step"
        ),
        work=work.count_q8_pool_dx,
    ),
    **_fuse(
        "pm_q8_pointwise_dw", forms.Q8_POINTWISE_DW, work.count_q8_pointwise_dw, *_INT8_UPDATES
    ),
    **_fuse(
        "pm_q8_conv2d_dw", forms.Q8_CONVOLUTION_DW, work.count_q8_convolution_dw, *_INT8_UPDATES
    ),
    **_fuse(
        "pm_q8_depthwise_dw",
        forms.Q8_DEPTHWISE_DW,
        work.count_q8_depthwise_dw,
        *_INT8_UPDATES,
    ),
}
"""The row of each kernel, by name."""


def find_form(call: Call) -> Form | None:
    """Return the form of the kernel of a call."""
    return CATALOGUE[call.kernel].form


def read_loops(call: Call) -> Loops | None:
    """Return a call as loops; None if it has none. Loops keep the condition of the call."""
    form = find_form(call)
    return None if form is None else form.read(call)


def write_loops(loops: Loops) -> Call | None:
    """Return the call that executes loops; None if the kernel cannot."""
    form = find_form(loops.call)
    return None if form is None else form.write(loops)


def is_divided_by_rows(kernel: str) -> bool:
    """Return whether a gradient kernel that also updates can start only at a row or filter.

    Others start at any element, ``first`` of their update.
    """
    fuses = CATALOGUE[kernel].fuses
    return fuses is not None and "first" not in find_kernel(fuses[1]).index_of


def moving_parameters(kernel: str) -> frozenset[str]:
    """Return the pointers (names) of an update kernel that move with the element of the state.

    Those of a gradient kernel that also updates are the pointers of its update; its gradient is
    read as a whole.
    """
    gradient, update = CATALOGUE[kernel].fuses or (None, kernel)
    form = CATALOGUE[update].form
    read_whole = find_kernel(gradient).index_of.keys() if gradient else ()
    strides = form.strides if isinstance(form, forms.ProductForm) else {}
    return frozenset(name for name in strides.keys() - read_whole if strides[name][-1] != 0)
