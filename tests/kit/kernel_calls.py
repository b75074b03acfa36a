"""Kernels of the exported C, built for this machine in double precision, called on numpy arrays."""

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

import poetmodel
from kit.programs import require_programs
from kit.shared_objects import STORE
from poetmodel.export.kernels import make_kernel_header
from poetmodel.lowered.calls import WORKSPACE, Buffer, DataType, Ref, ScaledLearningRate
from poetmodel.plan import Op
from poetmodel.torch import lowering
from poetmodel.torch.lowering.operands import Lowering, StridedView, data_type, find_lowering

SOURCES = Path(poetmodel.__file__).parent / "c"
KERNELS = SOURCES / "kernels"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wdouble-promotion", "-Wmissing-prototypes")
TOLERANCE = 1e-12
"""Relative tolerance of results in double precision."""

_NUMPY = {
    DataType.REAL: np.float64,
    DataType.INT32: np.int32,
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
}
_POISON = {DataType.REAL: np.nan, DataType.INT32: -(2**31), DataType.UINT8: 0xFF, DataType.INT8: -1}
_GUARD = 64
"""Elements before and after each buffer that a kernel may neither read nor write."""
_GUARDS = {t: np.full(_GUARD, _POISON[t], _NUMPY[t]).tobytes() for t in DataType}

_TYPES = {"pm_real": ctypes.c_double, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32}
_DEFINITION = re.compile(r"^(?:void|int) (pm_\w+)\(([^)]*)\)\n\{", re.MULTILINE)


def parse_parameters(kernel):
    """Return the C parameters of a kernel, read from its source."""
    source = (KERNELS / f"{kernel}.c").read_text(encoding="utf-8")
    parameters_of = dict(_DEFINITION.findall(source))
    assert list(parameters_of) == [kernel], "a file has one external function, of the same name"
    return tuple(" ".join(parameter.split()) for parameter in parameters_of[kernel].split(","))


@cache
def include_options():
    """Return the compiler options for the include folders of kernels; write their common header."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.c"))}
    text = make_kernel_header(texts)
    header = STORE.get_or_make("pm_kernels.h", lambda path: path.write_text(text, encoding="utf-8"))
    return (f"-I{KERNELS}", f"-I{SOURCES / 'src'}", f"-I{header.parent}")


@cache
def build_kernel(kernel):
    """Return a kernel as a function, built in double; undefined behaviour ends the process."""
    require_programs("cc")
    options = ("-std=c11", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-DPM_REAL=double")
    sanitizer_options = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
    # Generated code defines the step number, on which random numbers depend.
    source = f'#include "{kernel}.c"\n#include <stdint.h>\nuint32_t pm_random_step;\n'
    paths = (*include_options(), "-xc", "-", "-lm", "-o")
    command = ["cc", *options, *WARNINGS, *sanitizer_options, *paths]
    library = STORE.get_or_make(
        f"{kernel}.so",
        lambda path: subprocess.run([*command, path], input=source, text=True, check=True),
    )
    loaded = ctypes.CDLL(str(library))
    function = getattr(loaded, kernel)
    function.random_step = ctypes.c_uint32.in_dll(loaded, "pm_random_step")
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p if "*" in parameter else _TYPES[parameter.split()[0]]
        for parameter in parse_parameters(kernel)
    ]
    return function


def random_reals(*shape):
    """Return random float64 numbers of a shape; the shape is the seed."""
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
        """Return the elements of a buffer as a writable view."""
        return self._arrays[name][_GUARD:-_GUARD]

    def execute(self, calls, *, workspace_bytes=0):
        """Execute kernel calls with a workspace; fail if a kernel writes outside its buffers.

        `workspace_bytes` is the size in the build for the device [B].
        """
        n_elements = math.ceil(workspace_bytes / DataType.REAL.itemsize)
        self.buffers[WORKSPACE] = Buffer(elements=n_elements, type=DataType.REAL)
        self._arrays[WORKSPACE] = np.full(n_elements + 2 * _GUARD, np.nan)
        for call in calls:
            if call.condition and self[call.condition.counter.buffer][0] != call.condition.value:
                continue
            self.execute_call(call)
        self._check_guards()

    def execute_call(self, call):
        """Execute a kernel call, without its condition."""
        constant_arrays = []
        arguments = [self._to_c_argument(argument, constant_arrays) for argument in call.arguments]
        function = build_kernel(call.kernel)
        assert len(arguments) == len(function.argtypes), call
        function(*arguments)

    def _to_c_argument(self, argument, constant_arrays):
        if isinstance(argument, Ref):
            array = self._arrays[argument.buffer]
            assert 0 <= argument.offset <= len(array) - 2 * _GUARD, argument
            return array.ctypes.data + (_GUARD + argument.offset) * array.itemsize
        if isinstance(argument, tuple):
            constant_arrays.append(np.asarray(argument, np.int32))
            return constant_arrays[-1].ctypes.data
        if isinstance(argument, ScaledLearningRate):
            return argument.factor * self.learning_rate
        # A null pointer is the number 0.
        return argument

    def _check_guards(self):
        for name, array in self._arrays.items():
            guard = _GUARDS[self.buffers[name].type]
            assert array[:_GUARD].tobytes() == guard == array[-_GUARD:].tobytes(), (
                f"buffer {name}: a kernel wrote outside it"
            )


def execute_steps(step, *inputs, steps=1, program=None):
    """Return the memory after `steps` steps on the same batch.

    Nodes are executed in order, or by the (op, index) pairs of a plan's `program`. Freed buffers
    are poisoned, and page-ins restore the values that page-outs stored.
    """
    memory = Memory(step.buffers, learning_rate=step.learning_rate or 0.0)
    for name, values in step.values.items():
        memory[name][...] = values
    for value, tensor in zip(step.inputs, inputs, strict=True):
        memory[value.pieces[0].buffer][...] = tensor.reshape(-1).numpy()
    permanent_buffers = {*step.values, step.loss.buffer}
    default_program = tuple((Op.COMPUTE, k) for k in range(len(step.graph.nodes)))
    for step_number in range(steps):
        stored_values = {}
        for op, index in default_program if program is None else program:
            if op is Op.COMPUTE:
                for call in step.calls[index]:
                    build_kernel(call.kernel).random_step.value = step_number
                size_bytes = step.graph.nodes[index].workspace_bytes
                memory.execute(step.calls[index], workspace_bytes=size_bytes)
            elif step.graph.tensors[index].name not in permanent_buffers:
                _transfer_or_free(memory, stored_values, op, step.graph.tensors[index])
    return memory


def _transfer_or_free(memory, stored_values, op, tensor):
    """Page a tensor in or out, or free it; replacements share the memory of their state."""
    if tensor.replaces is not None:
        return
    if op is Op.PAGE_OUT:
        stored_values[tensor.name] = memory[tensor.name].copy()
    elif op is Op.PAGE_IN:
        memory[tensor.name][...] = stored_values[tensor.name]
    elif op is Op.FREE:
        memory[tensor.name][...] = _POISON[memory.buffers[tensor.name].type]


def list_kernels(step):
    """Return the kernel of each call of a step."""
    return [call.kernel for calls in step.calls for call in calls]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A lowered operation, with its operands and outputs."""

    operation: Lowering
    tensors: Mapping[str, torch.Tensor]
    """Tensor of each operand, by name of its placeholder."""
    operands: tuple[StridedView, ...]
    """Views of the operands."""
    outputs: Mapping[int, StridedView]
    """View of each output, by position."""

    def execute(self, calls=None, *, learning_rate=0.0):
        """Execute `calls`, by default those of the operation; return the outputs by position."""
        views = [*self.operands, *self.outputs.values()]
        n_elements = {}
        for view in views:
            n_elements[view.buffer] = max(n_elements.get(view.buffer, 0), _n_elements(view))
        types = {view.buffer: view.type for view in views}
        memory = Memory(
            {name: Buffer(elements=size, type=types[name]) for name, size in n_elements.items()},
            learning_rate=learning_rate,
        )
        for view, tensor in zip(self.operands, self.tensors.values(), strict=True):
            _array_of_view(memory, view)[...] = tensor.detach().numpy()
        memory.execute(
            self.operation.calls if calls is None else calls,
            workspace_bytes=self.operation.workspace_bytes,
        )
        return {
            position: torch.from_numpy(_array_of_view(memory, output).copy())
            for position, output in self.outputs.items()
        }


def lower_operation(operator, *args, strides=None, in_place_of=None, **kwargs):
    """Lower one operation on tensors; float64 stands for ``pm_real``.

    `strides` are those of outputs, by position, if they differ from PyTorch's. With `in_place_of`,
    output 0 uses the memory of the operand of that number.
    """
    for module in pkgutil.iter_modules(lowering.__path__):
        importlib.import_module(f"{lowering.__name__}.{module.name}")
    tensors = {}
    view_of_node = {}
    graph = fx.Graph()

    def placeholder(tensor):
        node = graph.placeholder(f"operand_{len(tensors)}")
        tensors[node.name] = tensor
        pointers = {t.untyped_storage().data_ptr(): n for n, t in reversed(tensors.items())}
        buffer = pointers[tensor.untyped_storage().data_ptr()]
        view_of_node[node] = _make_view(tensor, buffer, tensor.storage_offset())
        node.meta["val"] = tensor
        return node

    with_nodes = partial(tree_map_only, torch.Tensor, placeholder)
    node = graph.call_function(operator, *with_nodes((args, kwargs)))
    node.meta["val"] = results = operator(*args, **kwargs)
    result_list = results if isinstance(results, tuple | list) else (results,)
    outputs = {
        position: _make_view(result, f"output_{position}", 0, (strides or {}).get(position))
        for position, result in enumerate(result_list)
        if isinstance(result, torch.Tensor) and result.numel()
    }
    if in_place_of is not None:
        outputs[0] = tuple(view_of_node.values())[in_place_of]
    lower = find_lowering(operator)
    assert lower is not None, f"nothing lowers {operator}"
    operation = Lowering(node, view_of_node.__getitem__, outputs)
    lower(operation)
    return Lowered(
        operation=operation, tensors=tensors, operands=tuple(view_of_node.values()), outputs=outputs
    )


def check(operator, *args, tolerance=TOLERANCE, strides=None, **kwargs):
    """Assert that a lowered operation returns the results of PyTorch; return the operation.

    An elementwise operation is also executed in place of each operand with the output's layout.
    """
    lowered_operation = lower_operation(operator, *args, strides=strides, **kwargs)
    results = operator(*args, **kwargs)
    expected = results if isinstance(results, tuple | list) else (results,)
    _compare(lowered_operation.execute(), expected, tolerance)
    if lowered_operation.operation.can_overwrite_operand:
        output = lowered_operation.outputs[0]
        for number, operand in enumerate(lowered_operation.operands):
            if operand.has_layout_of(output) and operand.type is output.type:
                in_place_operation = lower_operation(
                    operator, *args, strides=strides, in_place_of=number, **kwargs
                )
                _compare(in_place_operation.execute(), expected, tolerance)
    return lowered_operation.operation


def check_call(operation, *tensors):
    """Check an operation of a table: (operator, arguments after `tensors`, keywords if any)."""
    return call_operation((partial(check, operation[0]), *operation[1:]), *tensors)


def call_operation(operation, *tensors):
    """Return the result of an operation of a table; see `check_call`."""
    operator, *arguments = operation
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    return operator(*tensors, *arguments, **keywords)


def _compare(outputs, expected, tolerance):
    for position, tensor in outputs.items():
        expected_tensor = expected[position]
        assert tensor.shape == expected_tensor.shape
        if not expected_tensor.is_floating_point():
            assert torch.equal(tensor.to(expected_tensor.dtype), expected_tensor), (
                f"output {position}"
            )
            continue
        scale = max(
            1.0,
            float(expected_tensor[expected_tensor.isfinite()].abs().max())
            if expected_tensor.isfinite().any()
            else 1.0,
        )
        torch.testing.assert_close(
            tensor, expected_tensor, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )


def _make_view(tensor, buffer, offset, strides=None):
    kind = DataType.REAL if tensor.dtype is torch.float64 else data_type(tensor.dtype)
    assert kind is not None, f"{tensor.dtype} is not exported"
    return StridedView(
        buffer=buffer,
        offset=offset,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()) if strides is None else strides,
        type=kind,
    )


def _n_elements(view):
    """Return the number of elements that a buffer needs for a view."""
    last_offsets = (
        (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
    )
    return view.offset + sum(last_offsets) + 1 if view.elements else view.offset


def _array_of_view(memory, view):
    array = memory[view.buffer][view.offset :]
    return np.lib.stride_tricks.as_strided(
        array, view.shape, tuple(stride * array.itemsize for stride in view.strides)
    )
