"""Small quantized networks, converted as PT2E does, and as ONNX files.

Needs PyTorch, but not torchao.
"""

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of PT2E
from torch import fx, nn
from torch.nn import functional

_DECOMPOSED = torch.ops.quantized_decomposed
aten = torch.ops.aten
WEIGHTED = (aten.conv2d.default, aten.conv2d.padding, aten.linear.default)
SUMS = (aten.add.Tensor,)
ACTIVATIONS = (aten.relu.default, aten.relu6.default, aten.hardtanh.default)
MOVED = (aten.max_pool2d.default, aten.flatten.using_ints, aten.dropout.default)
MEANS = (aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim)
LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-(2**15), 2**15 - 1)}


class Inverted(nn.Module):
    """An inverted residual block of MobileNetV2, without batch norm."""

    def __init__(self, channels):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Conv2d(channels, wide, 1)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.project = nn.Conv2d(wide, channels, 1)

    def forward(self, x):
        """Return the sum of x and the block's output."""
        y = functional.relu6(self.depthwise(functional.relu6(self.expand(x))))
        return x + self.project(y)


def float_front(width=8):
    """Return a float front with every kind of layer that has a kernel, for `images`."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), Inverted(width), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(width, 2 * width, 3, groups=2, padding="same", dilation=2), nn.ReLU(),
        nn.AvgPool2d(2, padding=1), nn.Dropout(), nn.Flatten(), nn.Linear(18 * width, 10),
        nn.ReLU6(),
    )  # fmt: skip


def images(batch=2, seed=0):
    """Return random images of 3 channels, 17 x 13, for `float_front`."""
    return torch.randn(batch, 3, 17, 13, generator=torch.Generator().manual_seed(seed))


def convert_front(front, x, *, dtype=torch.int8, weights=torch.int8, zero=0, per_channel=True):
    """Return a float front converted as ``convert_pt2e`` does, with ranges from the batch `x`.

    Activations have the type `dtype`; weights the type `weights` and the zero point `zero`, by
    channel or by tensor.
    """
    exported = torch.export.export(front.eval(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    module = exported.module()
    ranges = _Ranges(module)
    with torch.no_grad():
        ranges.run(x)
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "placeholder":
            _insert_quantization(graph, node, _find_grid(ranges.limits[node], dtype), dtype)
        elif node.target in MOVED:
            *_, scale, point, _, _, _ = node.args[0].args
            _insert_quantization(graph, node, (scale, point), dtype)
        elif node.target in (*WEIGHTED, *SUMS, *ACTIVATIONS, *MEANS):
            if node.target in WEIGHTED:
                _quantize_weight(module, node, weights, zero, per_channel=per_channel)
            users = list(node.users)
            if len(users) == 1 and users[0].target in ACTIVATIONS:
                continue
            _insert_quantization(graph, node, _find_grid(ranges.limits[node], dtype), dtype)
    graph.lint()
    module.recompile()
    return module


class _Ranges(fx.Interpreter):
    """Interpreter that records the minimum and maximum of each tensor, with 0 in between."""

    def __init__(self, module):
        super().__init__(module)
        self.limits = {}

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.limits[n] = (min(0.0, float(value.min())), max(0.0, float(value.max())))
        return value


def _find_grid(limits, dtype):
    low, high = LIMITS[dtype]
    scale = float(np.float32(max(limits[1] - limits[0], 1e-6) / (high - low)))
    return scale, int(np.clip(low - round(limits[0] / scale), low, high))


def _insert_quantization(graph, node, grid, dtype):
    with graph.inserting_after(node):
        q = graph.call_function(_DECOMPOSED.quantize_per_tensor.default)
    with graph.inserting_after(q):
        back = graph.call_function(_DECOMPOSED.dequantize_per_tensor.default)
    node.replace_all_uses_with(back)
    q.args = (node, *grid, *LIMITS[dtype], dtype)
    back.args = (q, *grid, *LIMITS[dtype], dtype)


def _quantize_weight(module, node, dtype, zero, *, per_channel):
    source = node.args[1]
    weight = module.get_parameter(source.target).detach()
    peaks = weight.flatten(1).abs().amax(1)
    scales = (peaks if per_channel else peaks.max().expand_as(peaks)) / 127
    shape = (-1, *[1] * (weight.ndim - 1))
    whole = torch.round(weight / scales.view(shape)) + zero
    name = f"frozen_{node.name}"
    module.register_buffer(name, whole.clamp(-127, 127).to(dtype))
    module.register_buffer(f"{name}_scale", scales.clone())
    module.register_buffer(f"{name}_zero", torch.full((len(scales),), zero, dtype=torch.int64))
    graph = module.graph
    limits = LIMITS[dtype]
    with graph.inserting_before(node):
        raw = graph.get_attr(name)
        if per_channel:
            grids = [graph.get_attr(f"{name}_{end}") for end in ("scale", "zero")]
            real = graph.call_function(
                _DECOMPOSED.dequantize_per_channel.default, (raw, *grids, 0, *limits, dtype)
            )
        else:
            real = graph.call_function(
                _DECOMPOSED.dequantize_per_tensor.default,
                (raw, float(scales[0]), zero, *limits, dtype),
            )
    node.args = (node.args[0], real, *node.args[2:])


# -- ONNX files ------------------------------------------------------------------------------------
def write_onnx(module, path, *, head=None):
    """Write a converted front, and the linear layer `head` after it, as an ONNX file (QDQ)."""
    from onnx import TensorProto, helper, save

    writer = _Writer(module)
    for node in module.graph.nodes:
        writer.write(node)
    result = module.graph.output_node().args[0][0].name
    if head is not None:
        names = [
            writer.add_constant(f"head.{name}", parameter.detach().numpy())
            for name, parameter in head.named_parameters()
        ]
        writer.nodes.append(helper.make_node("Gemm", [result, *names], ["logits"], transB=1))
        result = "logits"
    x = next(iter(module.graph.find_nodes(op="placeholder")))
    shape = ["batch", *images().shape[1:]]
    graph = helper.make_graph(
        writer.nodes,
        "quantized",
        [helper.make_tensor_value_info(x.name, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)],
        writer.constants,
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


class _Writer:
    """Writer of ONNX nodes for the nodes of a converted module, and of their constants."""

    def __init__(self, module):
        self.module = module
        self.nodes, self.constants = [], []

    def add_constant(self, name, array):
        """Add a constant; return its name."""
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def write(self, node):
        """Add the ONNX node or constant of a node of the module; inputs and outputs are skipped."""
        if node.op == "get_attr":
            tensors = dict(self.module.named_buffers()) | dict(self.module.named_parameters())
            array = tensors[node.target].detach().numpy()
            # In ONNX, zero points of weights have the type of the weights.
            self.add_constant(
                node.name, array.astype(np.int8) if node.target.endswith("_zero") else array
            )
        elif node.op == "call_function":
            self.node, self.given = node, node.args
            getattr(self, str(node.target).split(".")[-2])()

    def _add(self, operator, *inputs, **attributes):
        from onnx import helper

        names = [
            i.name
            if isinstance(i, fx.Node)
            else self.add_constant(f"held_{len(self.constants)}", np.asarray(i))
            for i in inputs
        ]
        made = helper.make_node(operator, names, [self.node.name], **attributes)
        made.name = f"{operator}_{self.node.name}"
        self.nodes.append(made)

    def quantize_per_tensor(self, operator="QuantizeLinear"):
        x, scale, zero, *_, dtype = self.given
        self._add(operator, x, np.float32(scale), np.array(zero, TYPES[dtype]))

    def dequantize_per_tensor(self):
        self.quantize_per_tensor("DequantizeLinear")

    def dequantize_per_channel(self):
        self._add("DequantizeLinear", *self.given[:3], axis=self.given[3])

    def conv2d(self):
        plain = (None, [1, 1], [0, 0], [1, 1], 1)
        x, w, *others = self.given
        bias, stride, pads, dilation, groups = (*others, *plain[len(others) :])
        if pads == "same":
            window = self.module.get_buffer(w.args[0].target).shape[2:]
            reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
            pads = [n // 2 for n in reach] + [n - n // 2 for n in reach]
        else:
            pads = [*pads, *pads]
        inputs = [x, w] if bias is None else [x, w, bias]
        self._add("Conv", *inputs, strides=stride, pads=pads, dilations=dilation, group=groups)

    def linear(self):
        self._add("Gemm", *self.given, transB=1)

    def relu(self):
        self._add("Relu", self.given[0])

    def relu6(self):
        self.hardtanh()

    def hardtanh(self):
        self._add("Clip", self.given[0], np.float32(0), np.float32(6))

    def add(self):
        self._add("Add", *self.given)

    def max_pool2d(self, operator="MaxPool", **more):
        x, size, stride, pads = self.given[:4]
        self._add(operator, x, kernel_shape=size, strides=stride, pads=[*pads, *pads], **more)

    def avg_pool2d(self):
        self.max_pool2d("AveragePool", count_include_pad=1)

    def flatten(self):
        self._add("Flatten", self.given[0])

    def dropout(self):
        self._add("Identity", self.given[0])


TYPES = {torch.int8: np.int8, torch.uint8: np.uint8}
"""NumPy types of zero points by PyTorch type."""
