"""Forms: a call that is written for loops executes these loops, or is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest

from poetmodel.lowered.calls import Call, ConvolutionSizes, Ref
from poetmodel.lowered.catalogue import CATALOGUE, read_loops, write_loops
from poetmodel.lowered.forms import ProductForm, SumForm
from poetmodel.lowered.kernels import find_kernel

FORMED = sorted(name for name, row in CATALOGUE.items() if row.form is not None)
NUMBERS = (4, 4, 8, 1)
LISTS = {"shape", "outer", "inner", "steps", "strides", "rows", "columns"}


def draw_table(random, tensors):
    """Return a shape table with random sizes and strides."""
    rank = random.randint(1, 3)
    numbers = [
        random.choice((1, 2, 3, 4)) if k % (1 + tensors) == 0 else random.choice((0, 1, 2, 8))
        for k in range(rank * (1 + tensors))
    ]
    return (rank, *numbers)


def draw_list(random, name, kernel, tensors):
    """Return a random list of integers for a parameter."""
    is_table = kernel.index_of.keys() & {"outer", "inner"} or "batch" not in kernel.index_of
    if name == "shape" and not is_table:
        sizes = [random.choice(NUMBERS) for _ in ConvolutionSizes._fields]
        sizes[-2] = random.choice((1, sizes[0]))  # groups
        sizes[-1] = random.choice((0, 0, 16))  # filter
        return tuple(sizes)
    if name in ("steps", "strides"):
        return tuple(random.choice(NUMBERS) for _ in range(12))
    if name in ("rows", "columns"):
        return (0, 1)
    return draw_table(random, {"outer": 2, "inner": 1}.get(name, tensors))


def draw_loops(random, name):
    """Return the loops of a random call of a kernel that its form accepts."""
    kernel = find_kernel(name)
    pointers = [p.name for p in kernel.parameters if p.type.endswith("*") and p.name not in LISTS]
    tensors = len([pointer for pointer in pointers if pointer != "bits"])
    while True:
        arguments = {}
        for parameter in kernel.parameters:
            if parameter.name in pointers:
                arguments[parameter.name] = Ref(parameter.name, 8 * random.randrange(3))
            elif parameter.type.endswith("*"):
                arguments[parameter.name] = draw_list(random, parameter.name, kernel, tensors)
            elif parameter.type == "pm_real":
                arguments[parameter.name] = 0.5
            else:
                arguments[parameter.name] = random.choice(NUMBERS)
        arguments |= {key: 0 for key in ("first", "accumulate") if key in arguments}
        if random.random() < 0.5 and "in" in arguments and "count" in arguments:
            arguments["count"] = arguments["in"] * random.choice(NUMBERS)
        if "inner" in arguments and "results" in arguments:
            arguments["count"] = arguments["inner"] * arguments["results"]
        loops = read_loops(Call.by_name(name, **arguments))
        if loops is not None and all(size > 0 or d for d, size in enumerate(loops.sizes)):
            return loops


def change(random, loops):
    """Return loops of a slice: fewer iterations, and other strides in some tensors."""
    sizes, strides = list(loops.sizes), [list(each) for each in loops.strides]
    refs = [replace(ref, offset=ref.offset + random.choice((0, 8))) for ref in loops.refs]
    for _ in range(random.randint(1, 2)):
        d = random.randrange(len(sizes))
        sizes[d] = random.choice((sizes[d], -(-sizes[d] // 2), 1 if sizes[d] else 0))
        tensor = random.choice(strides)
        tensor[d] = random.choice((tensor[d], tensor[d], tensor[d] // 2, 2 * tensor[d]))
    return replace(loops, sizes=tuple(sizes), refs=tuple(refs), strides=tuple(map(tuple, strides)))


def visits(loops):
    """Return which elements of its tensors each iteration visits, in a canonical order."""
    sizes = [size or 2 for size in loops.sizes]
    grid = np.indices(sizes).reshape(len(sizes), -1)
    strides = np.array(loops.strides).reshape(len(loops.refs), -1)
    offsets = np.array([[ref.offset] for ref in loops.refs])
    return sorted(map(tuple, (offsets + strides @ grid).T.tolist()))


@pytest.mark.parametrize("name", FORMED)
def test_written_calls_execute_their_loops(name):
    """Written calls read back as the same iterations; a whole call as the same call."""
    random_ = random.Random(name)  # noqa: S311 - repeatable draws
    n_written = 0
    for _ in range(40):
        loops = draw_loops(random_, name)
        whole = write_loops(loops)
        assert whole is not None
        assert visits(read_loops(whole)) == visits(loops)
        if isinstance(CATALOGUE[name].form, ProductForm):
            assert read_loops(whole).strides == loops.strides
        changed = change(random_, loops)
        call = write_loops(changed)
        if call is None:
            continue
        n_written += 1
        back = read_loops(call)
        assert back is not None
        assert visits(back) == visits(changed)
        assert call.refs == changed.refs
        unchanged = {p.name for p in find_kernel(name).parameters if p.type == "pm_real"}
        assert all(call[key] == loops.call[key] for key in unchanged)
    assert n_written > 3


def test_contradictions_are_refused():
    """Half of the input channels cannot be read from images of all, or of another number."""
    sizes = ConvolutionSizes(8, 4, 4, 8, 4, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1)
    tensors = {name: Ref(name) for name in ("out", "x", "w", "start", "scale", "bias")}
    call = Call.by_name(
        "pm_q8_conv2d", **tensors, shape=tuple(sizes), batch=1, count=8, zero_x=0, inverse=1.0,
        zero=0, low=-128, high=127,
    )  # fmt: skip
    loops = read_loops(call)
    assert loops.sizes == (1, 8, 8, 0)
    half = replace(loops, sizes=(1, 4, 8, 0))
    assert write_loops(half)["count"] == 4
    assert write_loops(replace(loops, sizes=(1, 8, 4, 0))) is None
    out, x, *others = loops.strides
    assert write_loops(replace(loops, strides=(out, (*x[:-1], 16), *others))) is None


def test_a_single_iteration_has_any_stride():
    """Some channels of one vector can be quantized into a whole one, as they lie; of two, not."""
    numbers = {"channels": 8, "plane": 1, "inverse": 1.0, "zero": 0}
    for batch, is_written in ((1, True), (2, False)):
        tensors = {name: Ref(name) for name in ("out", "x")}
        loops = read_loops(Call.by_name("pm_q8_quantize", **tensors, batch=batch, **numbers))
        call = write_loops(replace(loops, sizes=(batch, 4, 1)))
        assert (call is not None) == is_written
        assert call is None or call["channels"] == 4


def test_sums_are_summed_in_any_order():
    """Loops whose result has no stride go to the inner table."""
    call = Call("pm_sum", (Ref("y"), Ref("x"), (1, 3, 1, 4), (1, 4, 1), 1.0))
    loops = read_loops(call)
    assert isinstance(CATALOGUE["pm_sum"].form, SumForm)
    swapped = replace(loops, sizes=loops.sizes[::-1], strides=((0, 1), (1, 4)))
    assert write_loops(swapped) == call
