"""Kernels: the facts of their rows agree with their C files."""

import pytest

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.kernels import find_kernel, kernel_names


def test_each_kernel_has_a_row():
    """A kernel without a row, or a row without a kernel, would fail only where it is called."""
    assert CATALOGUE.keys() == kernel_names()


@pytest.mark.parametrize("name", sorted(kernel_names()))
def test_row_names_parameters(name):
    """Pointers precede numbers; a fused kernel has the parameters of both kernels."""
    kernel, row = find_kernel(name), CATALOGUE[name]
    assert len(kernel.index_of) == len(kernel.parameters)
    if row.index is not None:
        assert kernel.parameters[kernel.index_of[row.index]].type == "const int32_t *"
    else:
        assert not {"index", "target"} & kernel.index_of.keys()
    if row.begins_as_nan is not None:
        assert kernel.parameters[kernel.index_of[row.begins_as_nan]].is_written
    if row.slope is not None:
        slope = row.slope
        stated = {"bits", "x", "shape", *slope.limits}
        assert find_kernel(slope.mask).index_of.keys() == stated
        assert find_kernel(slope.apply).index_of.keys() == {"out", *stated} - {*slope.limits} | {
            *slope.factor
        }
        numbers = {*slope.limits.values(), *slope.factor.values()}
        assert {number for number in numbers if isinstance(number, str)} <= kernel.index_of.keys()
    if row.fuses is not None:
        gradient, update = map(find_kernel, row.fuses)
        assert kernel.is_random == update.is_random
        written = [parameter.name for parameter in kernel.parameters if parameter.is_written]
        assert written == [each.name for each in update.parameters if each.is_written]
        assert gradient.index_of.keys() - kernel.index_of.keys() <= {
            "out", "dw", "out_row", "accumulate"
        }  # fmt: skip


def test_copies_are_not_what_begins_like_them():
    """There is one for each type; other kernels, whatever their names begin with, compute."""
    copies = {name for name in kernel_names() if Call(name, ()).is_copy}
    assert copies == {"pm_copy", "pm_copy_byte", "pm_copy_int", "pm_copy_int8"}
    assert not Call("pm_copysign", ()).is_copy


def test_random_kernels_read_the_number_of_the_step():
    """They are those whose masks, samples or roundings differ from step to step."""
    drawn = {name for name in kernel_names() if find_kernel(name).is_random}
    assert drawn == {
        "pm_dropout", "pm_dropout_bits", "pm_bernoulli", "pm_normal", "pm_uniform",
        "pm_q8_stochastic", "pm_q8_pointwise_dw_stochastic", "pm_q8_conv2d_dw_stochastic",
        "pm_q8_depthwise_dw_stochastic",
    }  # fmt: skip


def test_arguments_have_names():
    """By name, a call is read, changed and made; a missing or unknown name is an error."""
    call = Call.by_name("pm_sgd", w=Ref("w"), gradient=Ref("g"), n=4, lr=0.1, sign=1.0, decay=0.0)
    assert call == Call("pm_sgd", (Ref("w"), Ref("g"), 4, 0.1, 1.0, 0.0))
    assert (call["n"], "n" in call, "m" in call) == (4, True, False)
    assert call.with_arguments(n=2).arguments == (Ref("w"), Ref("g"), 2, 0.1, 1.0, 0.0)
    assert call.pointers == {"w": Ref("w"), "gradient": Ref("g")}
    assert call.writes == (Ref("w"),)
    for arguments in ({"w": Ref("w")}, {**call.named_arguments, "m": 1}):
        with pytest.raises(KeyError):
            Call.by_name("pm_sgd", **arguments)
    with pytest.raises(KeyError):
        call.with_arguments(m=1)
