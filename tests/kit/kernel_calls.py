"""Kernels of the exported C, built for this machine in double and called on numpy arrays."""

import ctypes
import importlib
import math
import pkgutil
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_map_only

import poetmodel.export
from kit.programs import needs
from kit.shared_objects import STORE
from poetmodel.export.kernels import make_kernel_header
from poetmodel.lowered.calls import WORKSPACE, Buffer, DataType, Ref, ScaledLearningRate
from poetmodel.plan import Op
from poetmodel.torch import lowering
from poetmodel.torch.lowering.operands import Lowering, StridedView, data_type, find_lowering

SOURCES = Path(poetmodel.export.__file__).parent / "c"
KERNELS = SOURCES / "kernels"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wdouble-promotion", "-Wmissing-prototypes")
TOLERANCE = 1e-12

_NUMPY = {
    DataType.REAL: np.float64,
    DataType.INT32: np.int32,
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
}
_POISON = {DataType.REAL: np.nan, DataType.INT32: -(2**31), DataType.UINT8: 0xFF, DataType.INT8: -1}
_GUARD = 64
"""Elements before and after each buffer that a kernel may neither read nor write."""

_TYPES = {"pm_real": ctypes.c_double, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32}
_DEFINITION = re.compile(r"^(?:void|int) (pm_\w+)\(([^)]*)\)\n\{", re.MULTILINE)


def parameters(kernel):
    """Return the parameters of a kernel as its source has them."""
    source = (KERNELS / f"{kernel}.c").read_text(encoding="utf-8")
    found = dict(_DEFINITION.findall(source))
    assert list(found) == [kernel], "a file has one external function, of the same name"
    return tuple(" ".join(part.split()) for part in found[kernel].split(","))


@cache
def included():
    """Return the options of a compiler for what kernels include, the header of all among it."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.c"))}
    text = make_kernel_header(texts)
    header = STORE.keep("pm_kernels.h", lambda path: path.write_text(text, encoding="utf-8"))
    return (f"-I{KERNELS}", f"-I{SOURCES / 'src'}", f"-I{header.parent}")


@cache
def built(kernel):
    """Return a kernel, built in double; what C leaves undefined ends the process."""
    needs("cc")
    options = ("-std=c11", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-DPM_REAL=double")
    checks = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
    # What generated code defines: the number of the step, which random numbers depend on.
    text = f'#include "{kernel}.c"\n#include <stdint.h>\nuint32_t pm_random_step;\n'
    paths = (*included(), "-xc", "-", "-lm", "-o")
    command = ["cc", *options, *WARNINGS, *checks, *paths]
    library = STORE.keep(
        f"{kernel}.so",
        lambda path: subprocess.run([*command, path], input=text, text=True, check=True),
    )
    loaded = ctypes.CDLL(str(library))
    function = getattr(loaded, kernel)
    function.random_step = ctypes.c_uint32.in_dll(loaded, "pm_random_step")
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p if "*" in parameter else _TYPES[parameter.split()[0]]
        for parameter in parameters(kernel)
    ]
    return function


def real(*shape):
    """Return random numbers in double."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Memory:
    """Buffers of a step, each between guards; unwritten bytes are poisoned."""

    def __init__(self, buffers, *, learning_rate=0.0):
        self.buffers = dict(buffers)
        self.learning_rate = learning_rate
        self._arrays = {
            name: np.full(b.elements + 2 * _GUARD, _POISON[b.type], _NUMPY[b.type])
            for name, b in self.buffers.items()
        }

    def __getitem__(self, name):
        """Return the elements of a buffer, which may be written."""
        return self._arrays[name][_GUARD:-_GUARD]

    def execute(self, calls, *, workspace_bytes=0):
        """Execute calls, with their workspace of the build for the device [B]."""
        size = math.ceil(workspace_bytes / DataType.REAL.itemsize)
        self.buffers[WORKSPACE] = Buffer(elements=size, type=DataType.REAL)
        self._arrays[WORKSPACE] = np.full(size + 2 * _GUARD, np.nan)
        for call in calls:
            if call.condition and self[call.condition.counter.buffer][0] != call.condition.value:
                continue
            kept = []
            arguments = [self._argument(a, kept) for a in call.arguments]
            function = built(call.kernel)
            assert len(arguments) == len(function.argtypes), call
            function(*arguments)
        self._check_guards()

    def _argument(self, argument, kept):
        if isinstance(argument, Ref):
            array = self._arrays[argument.buffer]
            assert 0 <= argument.offset <= len(array) - 2 * _GUARD, argument
            return array.ctypes.data + (_GUARD + argument.offset) * array.itemsize
        if isinstance(argument, tuple):
            kept.append(np.asarray(argument, np.int32))
            return kept[-1].ctypes.data
        if isinstance(argument, ScaledLearningRate):
            return argument.factor * self.learning_rate
        # A pointer that is not there is the number 0.
        return argument

    def _check_guards(self):
        for name, array in self._arrays.items():
            poison = np.asarray(_POISON[self.buffers[name].type], array.dtype)
            for side in (array[:_GUARD], array[-_GUARD:]):
                assert np.array_equal(side, np.broadcast_to(poison, side.shape), equal_nan=True), (
                    f"buffer {name}: a kernel wrote beside it"
                )


def executed(step, *inputs, steps=1, program=None):
    """Return all buffers after some steps on the same batch.

    Nodes run in order, or as a program of a plan says: what that frees is lost, and what it pages
    in is what it paged out.
    """
    memory = Memory(step.buffers, learning_rate=step.learning_rate or 0.0)
    for name, values in step.values.items():
        memory[name][...] = values
    for value, tensor in zip(step.inputs, inputs, strict=True):
        memory[value.pieces[0].buffer][...] = tensor.reshape(-1).numpy()
    stays = {*step.values, step.loss.buffer}
    in_order = tuple((Op.COMPUTE, k) for k in range(len(step.graph.nodes)))
    for number in range(steps):
        stored = {}
        for op, index in in_order if program is None else program:
            if op is Op.COMPUTE:
                for call in step.calls[index]:
                    built(call.kernel).random_step.value = number
                size = step.graph.nodes[index].workspace_bytes
                memory.execute(step.calls[index], workspace_bytes=size)
            elif step.graph.tensors[index].name not in stays:
                _move(memory, stored, op, step.graph.tensors[index])
    return memory


def _move(memory, stored, op, tensor):
    """Page a tensor, or free it; a replacement lies where what it replaces does."""
    if tensor.replaces is not None:
        return
    if op is Op.PAGE_OUT:
        stored[tensor.name] = memory[tensor.name].copy()
    elif op is Op.PAGE_IN:
        memory[tensor.name][...] = stored[tensor.name]
    elif op is Op.FREE:
        memory[tensor.name][...] = _POISON[memory.buffers[tensor.name].type]


def kernels(step):
    """Return the kernels that a step calls."""
    return [call.kernel for calls in step.calls for call in calls]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """An operation on tensors that was lowered, and what it needs to be executed."""

    operation: Lowering
    tensors: Mapping[str, torch.Tensor]
    """For each buffer of an operand a tensor that lies in it."""
    looks: tuple[StridedView, ...]
    """Of the operands."""
    outputs: Mapping[int, StridedView]

    def execute(self, calls=None, *, learning_rate=0.0):
        """Return the outputs; other calls may stand for those that it was lowered to."""
        found = [*self.looks, *self.outputs.values()]
        sizes = {}
        for look in found:
            sizes[look.buffer] = max(sizes.get(look.buffer, 0), _extent(look))
        types = {look.buffer: look.type for look in found}
        memory = Memory(
            {name: Buffer(elements=size, type=types[name]) for name, size in sizes.items()},
            learning_rate=learning_rate,
        )
        for look, tensor in zip(self.looks, self.tensors.values(), strict=True):
            _view_of(memory, look)[...] = tensor.detach().numpy()
        memory.execute(
            self.operation.calls if calls is None else calls,
            workspace_bytes=self.operation.workspace_bytes,
        )
        return {p: torch.from_numpy(_view_of(memory, o).copy()) for p, o in self.outputs.items()}


def lowered(operator, *args, strides=None, in_place_of=None, **kwargs):
    """Lower one operation on tensors, in which float64 stands for ``pm_real``.

    `strides` are those of outputs where they are not PyTorch's; with `in_place_of` the output 0
    lies where the operand of that number lies.
    """
    for module in pkgutil.iter_modules(lowering.__path__):
        importlib.import_module(f"{lowering.__name__}.{module.name}")
    tensors = {}
    looks = {}
    graph = fx.Graph()

    def placeholder(tensor):
        node = graph.placeholder(f"operand_{len(tensors)}")
        tensors[node.name] = tensor
        pointers = {t.untyped_storage().data_ptr(): n for n, t in reversed(tensors.items())}
        buffer = pointers[tensor.untyped_storage().data_ptr()]
        looks[node] = _look(tensor, buffer, tensor.storage_offset())
        node.meta["val"] = tensor
        return node

    with_nodes = partial(tree_map_only, torch.Tensor, placeholder)
    node = graph.call_function(operator, *with_nodes((args, kwargs)))
    node.meta["val"] = results = operator(*args, **kwargs)
    several = results if isinstance(results, tuple | list) else (results,)
    outputs = {
        position: _look(result, f"output_{position}", 0, (strides or {}).get(position))
        for position, result in enumerate(several)
        if isinstance(result, torch.Tensor) and result.numel()
    }
    if in_place_of is not None:
        outputs[0] = tuple(looks.values())[in_place_of]
    lower = find_lowering(operator)
    assert lower is not None, f"nothing lowers {operator}"
    operation = Lowering(node, looks.__getitem__, outputs)
    lower(operation)
    return Lowered(
        operation=operation, tensors=tensors, looks=tuple(looks.values()), outputs=outputs
    )


def check(operator, *args, tolerance=TOLERANCE, strides=None, **kwargs):
    """Hold an operation, lowered and executed, to what PyTorch returns.

    One that is elementwise is also executed in place of each operand that lies like its output.
    """
    ours = lowered(operator, *args, strides=strides, **kwargs)
    results = operator(*args, **kwargs)
    expected = results if isinstance(results, tuple | list) else (results,)
    _compare(ours.execute(), expected, tolerance)
    if ours.operation.is_elementwise:
        own = ours.outputs[0]
        for number, look in enumerate(ours.looks):
            if look.has_layout_of(own) and look.type is own.type:
                again = lowered(operator, *args, strides=strides, in_place_of=number, **kwargs)
                _compare(again.execute(), expected, tolerance)
    return ours.operation


def check_call(operation, *tensors):
    """Check a row of a table: an operator, what it takes behind `tensors`, and its keywords."""
    operator, *rest = operation
    keywords = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    return check(operator, *tensors, *rest, **keywords)


def _compare(found, expected, tolerance):
    for position, tensor in found.items():
        want = expected[position]
        assert tensor.shape == want.shape
        if not want.is_floating_point():
            assert torch.equal(tensor.to(want.dtype), want), f"output {position}"
            continue
        scale = max(1.0, float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 1.0)
        torch.testing.assert_close(
            tensor, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )


def _look(tensor, buffer, offset, strides=None):
    kind = DataType.REAL if tensor.dtype is torch.float64 else data_type(tensor.dtype)
    assert kind is not None, f"{tensor.dtype} is not exported"
    return StridedView(
        buffer=buffer,
        offset=offset,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()) if strides is None else strides,
        type=kind,
    )


def _extent(look):
    """Return how many elements a buffer needs for a look."""
    ends = ((size - 1) * step for size, step in zip(look.shape, look.strides, strict=True))
    return look.offset + sum(ends) + 1 if look.elements else look.offset


def _view_of(memory, look):
    array = memory[look.buffer][look.offset :]
    return np.lib.stride_tricks.as_strided(
        array, look.shape, tuple(step * array.itemsize for step in look.strides)
    )
