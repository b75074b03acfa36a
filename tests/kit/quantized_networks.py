"""Small quantized networks, as PT2E converts them and as ONNX files; needs PyTorch, no torchao."""

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
    """An inverted residual as MobileNetV2 has it, without batch norm."""

    def __init__(self, channels):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Conv2d(channels, wide, 1)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.project = nn.Conv2d(wide, channels, 1)

    def forward(self, x):
        """Return x and what the block makes of it."""
        y = functional.relu6(self.depthwise(functional.relu6(self.expand(x))))
        return x + self.project(y)


def float_front(width=8):
    """Return a front of all layers that have a kernel, for images of 3 channels, 17 x 13."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), Inverted(width), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(width, 2 * width, 3, groups=2, padding="same", dilation=2), nn.ReLU(),
        nn.AvgPool2d(2, padding=1), nn.Dropout(), nn.Flatten(), nn.Linear(18 * width, 10),
        nn.ReLU6(),
    )  # fmt: skip


def images(batch=2, seed=0):
    """Return random images for `float_front`."""
    return torch.randn(batch, 3, 17, 13, generator=torch.Generator().manual_seed(seed))


def converted(front, x, *, dtype=torch.int8, weights=torch.int8, zero=0, per_channel=True):
    """Return a front as ``convert_pt2e`` writes it, its activations by what they are on a batch."""
    exported = torch.export.export(
        front.eval(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    module = exported.module()
    seen = _Ranges(module)
    with torch.no_grad():
        seen.run(x)
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "placeholder":
            _quantized(graph, node, _grid(seen.of[node], dtype), dtype)
        elif node.target in MOVED:
            *_, scale, point, _, _, _ = node.args[0].args
            _quantized(graph, node, (scale, point), dtype)
        elif node.target in (*WEIGHTED, *SUMS, *ACTIVATIONS, *MEANS):
            if node.target in WEIGHTED:
                _quantized_weight(module, node, weights, zero, per_channel=per_channel)
            users = list(node.users)
            if len(users) == 1 and users[0].target in ACTIVATIONS:
                continue
            _quantized(graph, node, _grid(seen.of[node], dtype), dtype)
    graph.lint()
    module.recompile()
    return module


class _Ranges(fx.Interpreter):
    """Notes the least and the largest number of each tensor."""

    def __init__(self, module):
        super().__init__(module)
        self.of = {}

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.of[n] = (min(0.0, float(value.min())), max(0.0, float(value.max())))
        return value


def _grid(limits, dtype):
    low, high = LIMITS[dtype]
    scale = float(np.float32(max(limits[1] - limits[0], 1e-6) / (high - low)))
    return scale, int(np.clip(low - round(limits[0] / scale), low, high))


def _quantized(graph, node, grid, dtype):
    with graph.inserting_after(node):
        q = graph.call_function(_DECOMPOSED.quantize_per_tensor.default)
    with graph.inserting_after(q):
        back = graph.call_function(_DECOMPOSED.dequantize_per_tensor.default)
    node.replace_all_uses_with(back)
    q.args = (node, *grid, *LIMITS[dtype], dtype)
    back.args = (q, *grid, *LIMITS[dtype], dtype)


def _quantized_weight(module, node, dtype, zero, *, per_channel):
    source = node.args[1]
    weight = module.get_parameter(source.target).detach()
    peaks = weight.flatten(1).abs().amax(1)
    scales = (peaks if per_channel else peaks.max().expand_as(peaks)) / 127
    shape = (-1, *[1] * (weight.ndim - 1))
    whole = torch.round(weight / scales.view(shape)) + zero
    held = f"frozen_{node.name}"
    module.register_buffer(held, whole.clamp(-127, 127).to(dtype))
    module.register_buffer(f"{held}_scale", scales.clone())
    module.register_buffer(f"{held}_zero", torch.full((len(scales),), zero, dtype=torch.int64))
    graph = module.graph
    limits = LIMITS[dtype]
    with graph.inserting_before(node):
        raw = graph.get_attr(held)
        if per_channel:
            others = [graph.get_attr(f"{held}_{name}") for name in ("scale", "zero")]
            real = graph.call_function(
                _DECOMPOSED.dequantize_per_channel.default, (raw, *others, 0, *limits, dtype)
            )
        else:
            real = graph.call_function(
                _DECOMPOSED.dequantize_per_tensor.default,
                (raw, float(scales[0]), zero, *limits, dtype),
            )
    node.args = (node.args[0], real, *node.args[2:])


# -- as a file of ONNX -----------------------------------------------------------------------------
def write_onnx(module, path, *, head=None):
    """Write a converted front as nodes of QDQ, with a linear layer behind it if one is given."""
    from onnx import TensorProto, helper, numpy_helper, save

    nodes, held = [], {}

    def name(value):
        if isinstance(value, fx.Node):
            return value.name
        array = np.asarray(value)
        key = f"constant_{len(held)}"
        held[key] = numpy_helper.from_array(array, key)
        return key

    def add(operator, node, *inputs, **attributes):
        made = helper.make_node(operator, [name(i) for i in inputs], [node.name], **attributes)
        made.name = f"{operator}_{node.name}"
        nodes.append(made)

    types = {torch.int8: np.int8, torch.uint8: np.uint8}
    for node in module.graph.nodes:
        operator = str(node.target).split(".")[-2] if node.op == "call_function" else ""
        given = node.args
        if node.op == "get_attr":
            value = module.get_parameter if "frozen" not in node.target else module.get_buffer
            array = value(node.target).detach().numpy()
            # Zeros of weights have the type of these in ONNX.
            array = array.astype(np.int8) if node.target.endswith("_zero") else array
            held[node.name] = numpy_helper.from_array(array, node.name)
        elif operator in ("quantize_per_tensor", "dequantize_per_tensor"):
            kind = types[given[5]]
            which = "QuantizeLinear" if operator[0] == "q" else "DequantizeLinear"
            add(which, node, given[0], np.float32(given[1]), np.array(given[2], kind))
        elif operator == "dequantize_per_channel":
            add("DequantizeLinear", node, *given[:3], axis=given[3])
        elif operator == "conv2d":
            x, w, bias, stride, pads, dilation, groups = (*given, *_PLAIN[len(given) - 2 :])
            if pads == "same":
                reach = [d * (k - 1) for d, k in zip(dilation, _window(module, w), strict=True)]
                pads = [n // 2 for n in reach] + [n - n // 2 for n in reach]
            else:
                pads = [*pads, *pads]
            inputs = [x, w] if bias is None else [x, w, bias]
            add("Conv", node, *inputs, strides=stride, pads=pads, dilations=dilation, group=groups)
        elif operator == "linear":
            add("Gemm", node, *given, transB=1)
        elif operator == "relu":
            add("Relu", node, given[0])
        elif operator in ("relu6", "hardtanh"):
            add("Clip", node, given[0], np.float32(0), np.float32(6))
        elif operator == "add":
            add("Add", node, *given)
        elif operator == "max_pool2d":
            pads = [*given[3], *given[3]]
            add("MaxPool", node, given[0], kernel_shape=given[1], strides=given[2], pads=pads)
        elif operator == "avg_pool2d":
            size, pads = given[1], [*given[3], *given[3]]
            add(
                "AveragePool", node, given[0], kernel_shape=size, strides=given[2], pads=pads,
                count_include_pad=1,
            )  # fmt: skip
        elif operator == "flatten":
            add("Flatten", node, given[0])
        elif operator == "dropout":
            add("Identity", node, given[0])
    result = module.graph.output_node().args[0][0].name
    if head is not None:
        parameters = {f"head.{n}": p.detach().numpy() for n, p in head.named_parameters()}
        held.update({n: numpy_helper.from_array(a, n) for n, a in parameters.items()})
        nodes.append(helper.make_node("Gemm", [result, *parameters], ["logits"], transB=1))
        result = "logits"
    x = next(iter(module.graph.find_nodes(op="placeholder")))
    shape = ["batch", *images().shape[1:]]
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info(x.name, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)],
        list(held.values()),
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


_PLAIN = (None, [1, 1], [0, 0], [1, 1], 1)


def _window(module, weight):
    return module.get_buffer(weight.args[0].target).shape[2:]
