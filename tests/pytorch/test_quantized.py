"""Quantized fronts of PT2E and ONNX files, byte by byte; refusals."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import fx, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.commands import invoke  # noqa: E402
from kit.kernel_calls import execute_steps  # noqa: E402
from kit.quantized_networks import (  # noqa: E402
    Inverted,
    convert_front,
    float_front,
    images,
    write_onnx,
)
from kit.traced_models import FunctionModule  # noqa: E402
from mcu.fronts import compare_layers  # noqa: E402
from poetmodel.errors import InputError, MissingExtraError  # noqa: E402
from poetmodel.lowered.io import save_step  # noqa: E402
from poetmodel.lowered.step import DataType  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402
from poetmodel.torch.int8.reading import with_fronts  # noqa: E402
from poetmodel.torch.lowering.inference import with_inference  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

pytestmark = pytest.mark.torch
KINDS = {
    "int8": {},
    "uint8": {"dtype": torch.uint8},
    "weights of one scale": {"per_channel": False},
}
LABELS = torch.tensor([0, 2])


def training(*, wrapped=False):
    """Return a converted front with a head, the loss, and inputs."""
    front = convert_front(float_front(), images(8))
    first = pmt.quantized(front) if wrapped else front
    return nn.Sequential(first, nn.Linear(10, 3)), functional.cross_entropy, (images(), LABELS)


def sgd(net, **options):
    """Return SGD of all parameters of a network, those of its front among them."""
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


# -- what they compute -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_that_of_pytorch_within_one_step(kind):
    """With PyTorch's operands, a layer has its values except for a rare last bit."""
    module = convert_front(_without_flatten(), images(8), **KINDS[kind])
    front = pmt.quantized(module)
    apart = torch.cat(
        [x.flatten() for x in compare_layers(front, module, images(16, seed=5)).values()]
    )
    assert apart.numel() > 50_000
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-4


def _without_flatten():
    """Return a front whose values all have one order in PyTorch."""
    front = float_front()
    return nn.Sequential(*list(front)[:8], nn.Conv2d(16, 12, 1), nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:])]
)
def test_a_front_is_near_its_float_self(kind):
    """Its results differ from those of the float network by a few percent."""
    net = float_front()
    front = pmt.quantized(convert_front(net, images(8), **KINDS[kind]))
    with torch.no_grad():
        mine, its = front(images()), net(images())
    assert mine.dtype is torch.float32
    assert float((mine - its).abs().max()) < 0.05 * float(its.abs().max())


@pytest.mark.parametrize("head", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_onnx_file_has_the_front_of_the_module(head, tmp_path):
    """QDQ nodes around a front have the same result; later layers are float, and train."""
    pytest.importorskip("onnx")
    module = convert_front(float_front(), images(8), dtype=torch.uint8)
    last = nn.Linear(10, 3) if head else nn.Identity()
    write_onnx(module, tmp_path / "front.onnx", head=last if head else None)
    net = pmt.from_onnx(tmp_path / "front.onnx")
    with torch.no_grad():
        assert torch.equal(net(images()), last(pmt.quantized(module)(images())))
    names = ["head.weight", "head.bias"] if head else []
    assert [name for name, _ in net.named_parameters()] == names


def test_fronts_of_files_may_leave_zero_points_out_and_state_scales_as_numbers(tmp_path):
    """A zero point without a name is 0, as for symmetric weights; the front is the same."""
    onnx = pytest.importorskip("onnx")
    module = convert_front(float_front(), images(8), per_channel=False)
    path = tmp_path / "front.onnx"
    write_onnx(module, path)
    model = onnx.load(path)
    values = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    constants = []
    for index, node in enumerate(model.graph.node):
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale = float(values[node.input[1]])
        constants.append(
            onnx.helper.make_node("Constant", [], [f"scale_{index}"], value_float=scale)
        )
        node.input[1] = f"scale_{index}"
        if node.op_type == "DequantizeLinear" and not values[node.input[2]].any():
            node.input[2] = ""
    nodes = [*constants, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert any(node.input[2] == "" for node in nodes if node.op_type == "DequantizeLinear")
    onnx.save(model, path)
    with torch.no_grad():
        assert torch.equal(pmt.from_onnx(path)(images()), pmt.quantized(module)(images()))


def write_linear(path, *, outside="", **attributes):
    """Write a quantized linear layer without zero points as an ONNX file, and return the model.

    The QuantizeLinear nodes have the `attributes`. `outside` is "layer" for a second layer, of
    which only the weight is quantized, or "result" for a first layer whose result is not quantized.
    """
    onnx = pytest.importorskip("onnx")
    make_node, make_value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [
        make_node("QuantizeLinear", ["x", "scale"], ["x_q"], "quantize_x", **attributes),
        make_node("DequantizeLinear", ["x_q", "scale"], ["x_d"], "dequantize_x"),
        make_node("DequantizeLinear", ["w", "scale"], ["w_d"], "dequantize_w"),
        make_node("Gemm", ["x_d", "w_d"], ["h"], "first", transB=1),
        make_node("QuantizeLinear", ["h", "scale"], ["h_q"], "quantize_h", **attributes),
        make_node("DequantizeLinear", ["h_q", "scale"], ["h_d"], "dequantize_h"),
        make_node("DequantizeLinear", ["w", "scale"], ["w_2"], "dequantize_w_2"),
        make_node("Gemm", ["h_d", "w_2"], ["y"], "second", transB=1),
    ]
    count, result = {"": (6, "h_d"), "layer": (8, "y"), "result": (4, "h")}[outside]
    weight = np.arange(-32, 32).reshape(8, 8).astype(np.int8)
    constants = {"scale": np.float32(0.125), "w": weight}
    graph = onnx.helper.make_graph(
        nodes[:count],
        "linear",
        [make_value("x", onnx.TensorProto.FLOAT, ("N", 8))],
        [make_value(result, onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, path)
    return model


@pytest.mark.parametrize(
    "types", [{}, {"output_dtype": 0}, {"output_dtype": 2}, {"output_dtype": 3}]
)
def test_fronts_of_files_have_the_type_that_they_state(types, tmp_path):
    """By default and with UINT8 (2), negative values become 0; with INT8 (3) they stay."""
    model = write_linear(tmp_path / "linear.onnx", **types)
    from onnx.reference import ReferenceEvaluator

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    assert (expected < 0).any() == (types.get("output_dtype") == 3)
    with torch.no_grad():
        found = pmt.from_onnx(tmp_path / "linear.onnx")(x)
    assert float((found - torch.from_numpy(expected)).abs().max()) <= 0.125


def write_inserted(path, *texts, **initializers):
    """Write the file of `write_linear` with nodes that compute the first layer's input ``r``."""
    model = write_linear(path)
    onnx = pytest.importorskip("onnx")
    model.graph.node[3].input[0] = "r"
    for position, text in enumerate(texts, start=2):
        model.graph.node.insert(position, onnx.parser.parse_node(text))
    for name, value in initializers.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    onnx.save(model, path)


@pytest.mark.parametrize("name", ["result", "records", "forward", "constant_0", "module_names"])
def test_nodes_of_fronts_may_have_any_name(name, tmp_path):
    """A layer with the name of an attribute is converted like any other layer."""
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "linear.onnx"
    model = write_linear(path)
    expected = pmt.from_onnx(path)(torch.ones(2, 8))
    model.graph.node[3].name = name
    onnx.save(model, path)
    assert torch.equal(pmt.from_onnx(path)(torch.ones(2, 8)), expected)


def test_fronts_of_files_may_compute_shapes(tmp_path):
    """A Reshape to sizes that other nodes compute is that of the file."""
    path = tmp_path / "linear.onnx"
    write_linear(path)
    expected = pmt.from_onnx(path)(torch.ones(2, 8))
    write_inserted(
        path,
        "all = Shape(x_d)",
        "first = Gather(all, zero)",
        "sizes = Concat <axis = 0>(first, rest)",
        "r = Reshape(x_d, sizes)",
        zero=[0],
        rest=[-1],
    )
    assert torch.equal(pmt.from_onnx(path)(torch.ones(2, 8)), expected)


def test_scales_of_fronts_may_be_limits_and_arrays(tmp_path):
    """A scale that is a limit of a Clip, too, and one with a dimension, are those of the file."""
    found = []
    for limit, scale in (("scale", "column"), ("limit", "scale")):
        write_inserted(
            tmp_path / "linear.onnx",
            f"c = Clip(x_d, low, {limit})",
            f"q = QuantizeLinear(c, {scale})",
            f"r = DequantizeLinear(q, {scale})",
            low=np.float32(0),
            limit=np.float32(0.125),
            column=np.float32([0.125]),
        )
        found.append(pmt.from_onnx(tmp_path / "linear.onnx")(images()[0, 0, :, :8]))
    assert torch.equal(*found)


def test_layers_after_a_front_may_leave_outputs_out(tmp_path):
    """An omitted zero point and an omitted output have the same empty name, without a meaning."""
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "linear.onnx"
    model = write_linear(path)
    expected = pmt.from_onnx(path)(torch.ones(2, 8))
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            node.input.append("")
    model.graph.node.append(onnx.parser.parse_node("y, mask = Dropout(h_d)"))
    model.graph.node[-1].output[1] = ""
    model.graph.output[0].name = "y"
    onnx.save(model, path)
    assert torch.equal(pmt.from_onnx(path).eval()(torch.ones(2, 8)), expected)


OUTPUTS = {
    "a mask": ("d, mask = Dropout(x_d)", "m = Cast <to = 1>(mask)", "r = Mul(d, m)"),
    "a split": ("a, b = Split <axis = 1, num_outputs = 2>(x_d)", "r = Concat <axis = 1>(b, a)"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_nodes_of_fronts_with_several_outputs_are_refused(case, tmp_path, told):
    """The message names the node or its operator, whichever output is read."""
    write_inserted(tmp_path / "linear.onnx", *OUTPUTS[case])
    with told.raises(InputError):
        pmt.from_onnx(tmp_path / "linear.onnx")


@pytest.mark.parametrize(
    "more",
    [{"output_dtype": 5}, {"block_size": 2}, {"outside": "layer"}, {"outside": "result"}],
    ids=["int16", "blocks", "a weight outside", "a result outside"],
)
def test_quantized_nodes_without_a_meaning_in_fronts_are_refused(more, tmp_path, told):
    """Other types, blocks with their own scale, and quantized weights of layers that are float."""
    write_linear(tmp_path / "linear.onnx", **more)
    with told.raises(InputError):
        pmt.from_onnx(tmp_path / "linear.onnx")


@pytest.mark.parametrize("computed", ["scale", "zero point"])
def test_fronts_with_computed_scales_are_refused(computed, tmp_path, told):
    """The message names the node, and the scale or zero point that depends on the input."""
    source = {"scale": "x", "zero point": "m"}[computed]
    operands = {"scale": "x_d, s, zero", "zero point": "x_d, scale, z"}[computed]
    write_inserted(
        tmp_path / "linear.onnx",
        "m = Identity(x_d)",
        f"s = ReduceMax <keepdims = 0>({source})",
        "z = Cast <to = 3>(s)",
        f"[again] q = QuantizeLinear({operands})",
        f"[back] r = DequantizeLinear({operands.replace('x_d', 'q')})",
        zero=np.int8(0),
    )
    with told.raises(InputError):
        pmt.from_onnx(tmp_path / "linear.onnx")


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT8E4M3FN"])
def test_fronts_with_weights_that_numpy_lacks_are_refused(kind, tmp_path, told):
    """The message names the weight and its type."""
    path = tmp_path / "linear.onnx"
    model = write_linear(path)
    onnx = pytest.importorskip("onnx")
    kind = getattr(onnx.TensorProto, kind)
    del model.graph.initializer[1]
    model.graph.initializer.append(onnx.helper.make_tensor("w", kind, [8, 8], [1] * 64))
    onnx.save(model, path)
    with told.raises(InputError):
        pmt.from_onnx(path)


def test_exported_c_has_the_bytes_of_the_definition():
    """Each int8 tensor of a lowered step, in C, is the layer's, as are loss and inference."""
    net, loss_fn, inputs = training(wrapped=True)
    found = {}
    for wire in net[0].wires:
        layer = net[0].get_submodule(wire.layer)
        keep = _keeper(found, f"0.{wire.layer}/q8_{layer.operator}")
        layer.register_forward_hook(keep)
    with torch.no_grad():
        logits = net(inputs[0])
    found = dict(found)
    step = with_inference(lower(net, loss_fn, inputs), net, loss_fn, inputs)
    memory = execute_steps(step, *inputs)
    kinds = {name for name, buffer in step.buffers.items() if buffer.type is DataType.INT8}
    made = kinds & found.keys()
    assert len(made) == len(found) - 1  # all but what dequantizes
    for name in made:
        assert np.array_equal(memory[name], found[name].numpy().ravel()), name
    loss = float(loss_fn(logits.double(), inputs[1]))
    assert float(memory[step.loss.buffer][0]) == pytest.approx(loss, rel=1e-6)
    assert {"q8_conv2d", "q8_maximum"} <= {node.op for node in step.inference.graph.nodes}


def _keeper(found, name):
    def keep(*arguments):
        found[name] = arguments[-1]

    return keep


# -- where they stand --------------------------------------------------------------------------
@pytest.mark.slow
def test_a_converted_module_needs_nothing_of_its_user():
    """Its modes and parameters stay as they are, and an optimizer may have these."""
    net, loss_fn, inputs = training()
    optimizer = sgd(net, momentum=0.9)
    step = lower(net, loss_fn, inputs, optimizer=optimizer)
    assert isinstance(net[0], fx.GraphModule)
    assert [value.name for value in step.states if value.name.endswith("momentum_buffer")] == [
        "1.weight.momentum_buffer",
        "1.bias.momentum_buffer",
    ]
    traced = pmt.trace(net, loss_fn, inputs, optimizer=optimizer)
    assert "q8_depthwise" in {node.op for node in traced.graph.nodes}


def test_a_model_with_fronts_shares_all_else():
    """A model in a capture has its parameters, buffers and other modules."""
    net = nn.Module()
    net.body = nn.ModuleDict(
        {"front": convert_front(float_front(), images(8)), "norm": nn.Identity()}
    )
    net.head = nn.BatchNorm1d(10)
    net.register_buffer("count", torch.zeros(1))
    other = with_fronts(net)
    assert other.head is net.head
    assert other.body["norm"] is net.body["norm"]
    assert other.count is net.count
    assert isinstance(other.body["front"], pmt.QuantizedFront)
    assert isinstance(net.body["front"], fx.GraphModule)
    assert with_fronts(net.head) is net.head


def test_layers_have_names_of_their_own():
    """A module may have the name that a second call of another one would get."""

    class Twice(nn.Module):
        def __init__(self, name):
            super().__init__()
            torch.manual_seed(0)
            self.c, self.name = nn.Conv2d(3, 3, 1), name
            self.add_module(name, nn.Conv2d(3, 3, 1))

        def forward(self, x):
            return self.c(getattr(self, self.name)(self.c(x)))

    names = ("another", "c_pointwise2")
    fronts = [pmt.quantized(convert_front(Twice(name), images(8))) for name in names]
    assert torch.equal(*(front(images()) for front in fronts))


def test_limits_of_the_input_are_kept():
    """A quantizer that uses a part of the input's bytes keeps it, as for x86."""
    module = convert_front(nn.Sequential(nn.AvgPool2d(1)), images(8), dtype=torch.uint8)
    first, back = (next(n for n in module.graph.nodes if n.name.startswith(name))
                   for name in ("quantize_per_tensor", "dequantize_per_tensor"))  # fmt: skip
    for node in (first, back):
        node.args = (*node.args[:4], 127, *node.args[5:])
    module.recompile()
    with torch.no_grad():
        assert torch.equal(pmt.quantized(module)(images()), module(images()))


def test_a_front_has_no_modes_and_no_parameters():
    """``train()`` and ``eval()`` have no effect; it is copied and saved like any module."""
    front = pmt.quantized(convert_front(float_front(), images(8)))
    assert not list(front.parameters())
    expected = front.train()(images())
    assert torch.equal(front.eval()(images()), expected)
    assert torch.equal(copy.deepcopy(front)(images()), expected)
    file = io.BytesIO()
    torch.save(front, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images()), expected)
    other = pmt.quantized(convert_front(float_front(), images(8)))
    assert not torch.equal(other(images()), expected)


@pytest.mark.parametrize("wrapped", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_compiled_step_has_the_numbers_of_eager(wrapped):
    """``pmt.compile`` runs int8 layers in the order of a plan, computed again where that pays."""
    net, loss_fn, inputs = training(wrapped=wrapped)
    twin = nn.Sequential(with_fronts(net)[0], copy.deepcopy(net[1]))
    step = pmt.compile(net, loss_fn, inputs, ram="100%", device="rpi4b", optimizer=sgd(net))
    with step:
        loss = float(step(*inputs))
    expected = loss_fn(twin(inputs[0]), inputs[1])
    expected.backward()
    assert loss == expected.item()
    assert torch.equal(net[1].weight, twin[1].weight - 0.1 * twin[1].weight.grad)


@pytest.mark.slow
def test_results_say_what_they_are_exact_against(tmp_path, told):
    """A graph with int8 layers has the label, and so have commands and pages on it."""
    net, loss_fn, inputs = training()
    step = lower(net, loss_fn, inputs, optimizer=sgd(net))
    told(step.graph.exactness)
    path, schedule, page = (tmp_path / name for name in ("net.step.json", "a.json", "a.html"))
    save_step(step, path)
    given = ("--device", "nrf52840", "--time-limit", "20")
    limits = invoke("limits", str(path), *given)
    assert step.graph.exactness in " ".join(limits.out.split())
    solved = invoke("solve", str(path), *given, "--ram", "100%", "--out", str(schedule))
    assert step.graph.exactness in " ".join(solved.out.split())
    invoke("report", str(schedule), "--graph", str(path), "--out", str(page))
    assert step.graph.exactness in page.read_text(encoding="utf-8")
    plain = (nn.Linear(2, 1), functional.mse_loss, (torch.ones(1, 2), torch.ones(1, 1)))
    assert lower(*plain).graph.exactness == ""


@pytest.mark.slow
def test_choose_trains_none_of_a_front(told):
    """Layers of the front have no score, and a score for one is refused."""
    net, loss_fn, inputs = training()
    options = {"device": "nrf52840", "ram": "100%", "paging": False}
    choice = pmt.choose(net, loss_fn, inputs, scores="gradient-norm", **options)
    assert choice.layers == ("1",)
    assert "q8_conv2d" in {node.op for node in choice.step.graph.nodes}
    with told.raises(InputError):
        pmt.choose(net, loss_fn, inputs, scores={"0.2.expand": 1.0, "1": 1.0}, **options)


# -- what is refused ---------------------------------------------------------------------------
class _Attention(nn.Module):
    """Multiplies channels by a function of their means."""

    def __init__(self):
        super().__init__()
        self.of_means = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return x * self.of_means(x).sigmoid()


class _Broadcast(nn.Module):
    """Adds the means of channels to every pixel."""

    def __init__(self):
        super().__init__()
        self.convolution, self.means = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        y = self.convolution(x)
        return y + self.means(y)


class _Mean(nn.Module):
    def forward(self, x):
        return x.mean((-2, -1))


REFUSED = {
    "broadcast sums": (_Broadcast(), {}),
    "strides alone": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(1, stride=2)), {}),
    "zero points of weights": (nn.Conv2d(3, 4, 3), {"zero": 3}),
    "int16": (nn.Conv2d(3, 4, 3), {"dtype": torch.int16}),
    "weights of int16": (nn.Conv2d(3, 4, 3), {"weights": torch.int16}),
    "hard swish": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish()), {}),
    "products": (nn.Sequential(nn.Conv2d(3, 3, 1), _Attention()), {}),
    "transposed": (nn.ConvTranspose2d(3, 4, 3), {}),
    "batch norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), {}),
    "other means": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)), {}),
    "columns": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(11, 4)), {}),
    "ceil": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, ceil_mode=True)), {}),
    "means of rows": (nn.Sequential(nn.Flatten(), nn.Linear(663, 4), _Mean()), {}),
    "divisor": (nn.Sequential(nn.AvgPool2d(2, padding=1, count_include_pad=False)), {}),
    "sums of more than 32 bits": (nn.Sequential(nn.Flatten(), nn.Linear(663, 2)), {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_kernel_is_refused(what, told):
    """The error names the operator, its module, and a remedy."""
    front, options = REFUSED[what]
    module = convert_front(nn.Sequential(front), images(4), **options)
    if what.startswith("sums"):
        weight = next(b for name, b in module.named_buffers() if name.startswith("frozen_linear"))
        weight.resize_(2, 663 * 200).fill_(127)
    net = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(2))
    with told.raises(InputError, what):
        with_fronts(net)


def test_a_front_behind_trained_layers_is_refused(told):
    """Quantized layers have no gradient, in eager PyTorch either."""
    front = convert_front(float_front(), images(8))
    net = nn.Sequential(nn.Conv2d(3, 3, 1), front, nn.Linear(10, 3))
    with told.raises(CaptureError, "captured"):
        lower(net, functional.cross_entropy, (images(), LABELS))
    with told.raises(CaptureError, "eager"):
        pmt.quantized(front)(images().requires_grad_())
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    step = lower(net, functional.cross_entropy, (images(), LABELS))
    assert "q8_quantize" in {node.op for node in step.graph.nodes}


def test_onnx_files_that_are_no_front_are_refused(tmp_path, told):
    """A file whose quantized part has two ends, or open dimensions, is refused."""
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "front.onnx"
    write_onnx(convert_front(float_front(), images(8)), path)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(model, path)
    with told.raises(InputError, "open"):
        pmt.from_onnx(path)
    height = images(8).shape[2]
    fixed = pmt.from_onnx(path, batch=2, dims={"height": height})
    assert fixed.example_inputs()[0].shape == (2, *images(8).shape[1:])
    assert fixed(images(8)).isfinite().all()
    with pytest.raises(InputError, match="expected the shape"):
        fixed(torch.cat([images(8)] * 2, 2))
    write_onnx(convert_front(float_front(), images(8)), path)
    model = onnx.load(path)
    inner = next(node for node in model.graph.node if node.op_type == "MaxPool").output[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(inner, 1, None))
    onnx.save(model, path)
    with told.raises(InputError, "read behind"):
        pmt.from_onnx(path)


def test_quantized_says_what_it_needs(told, monkeypatch):
    """Batches for a float front, none for a converted one, one input, and torchao."""
    with told.raises(InputError, "none"):
        pmt.quantized(float_front())
    for what, batches in {
        "labels": [LABELS], "one tensor": images(), "not finite": [images() / 0]
    }.items():  # fmt: skip
        with told.raises(InputError, what):
            pmt.quantized(float_front(), batches)
    with told.raises(InputError, "quantized already"):
        pmt.quantized(pmt.quantized(convert_front(float_front(), images(8))), [images()])
    with told.raises(InputError, "converted"):
        pmt.quantized(convert_front(float_front(), images(8)), [images()])
    with told.raises(InputError, "two inputs"):
        pmt.quantized(nn.Bilinear(4, 4, 2), [torch.ones(2, 4)])
    monkeypatch.setattr("poetmodel.torch.errors.find_spec", lambda _: None)
    with told.raises(MissingExtraError, "torchao"):
        pmt.quantized(float_front(), [images()])


# -- by torchao --------------------------------------------------------------------------------
def with_norms():
    """Return a front with batch norms that have seen a batch."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), Inverted(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.MaxPool2d(2), nn.Dropout(), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10), nn.ReLU(),
    )  # fmt: skip
    net(images(16))
    return net


@pytest.mark.large
def test_quantized_is_one_line_from_a_float_front():
    """It accepts a data loader's batches of any size, and does not change the front."""
    pytest.importorskip("torchao")
    net = with_norms()
    state = copy.deepcopy(net.state_dict())
    front = pmt.quantized(net, [(images(n, seed=n), LABELS) for n in (4, 4, 3)])
    assert net.training
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        mine, its = front(images(seed=9)), net.eval()(images(seed=9))
    assert float((mine - its).abs().max()) < 0.1 * float(its.abs().max())
    with pytest.raises(InputError, match="batch 1 has samples of 3x16x13, the first of 3x17x13"):
        pmt.quantized(net, [images(), images()[:, :, 1:]])


@pytest.mark.large
@pytest.mark.parametrize("first", [True, False])
def test_zeros_around_what_is_quantized_are_those_of_the_kernel(first):
    """An uneven separate padding, before the first layer or behind another, adds no layer."""
    pytest.importorskip("torchao")
    pad, stem = nn.ZeroPad2d((0, 1, 0, 1)), [] if first else [nn.Conv2d(3, 3, 1), nn.ReLU()]
    net = nn.Sequential(*stem, pad, nn.Conv2d(3, 8, 3, 2), nn.ReLU6())
    front = pmt.quantized(net, [images(8)])
    with torch.no_grad():
        mine, its = front(images(8)), net(images(8))
    assert float((mine - its).abs().max()) < 0.05 * float(its.abs().max())
    operators = [front.get_submodule(wire.layer).operator for wire in front.wires]
    assert operators[0] == "quantize"
    assert operators.count("conv2d") == 1
    assert len(operators) == len(stem[:1]) + 3


@pytest.mark.large
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("name", ["clamp_min", "clamp_"])
def test_each_clamp_is_part_of_the_layer_before_it(name, ends):
    """Between two layers, and at the end of a front."""
    pytest.importorskip("torchao")
    clamp = FunctionModule(
        lambda own, x: getattr(own.layer(x), name)(0.1), layer=nn.Conv2d(3, 4, 1)
    )
    net = nn.Sequential(clamp, *([] if ends else [nn.Conv2d(4, 2, 1)]))
    front = pmt.quantized(net, [images(8)])
    operators = [front.get_submodule(wire.layer).operator for wire in front.wires]
    assert operators == ["quantize", *["pointwise"] * len(net), "dequantize"]
    with torch.no_grad():
        mine, its = front(images(8)), net(images(8))
    assert float((mine - its).abs().max()) < 0.05 * float(its.abs().max())


@pytest.mark.large
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchao's own, of its test quantizer
@pytest.mark.parametrize("quantizer", ["XNNPACK", "x86"])
def test_modules_of_other_quantizers_are_read(quantizer):
    """Converted by a quantizer of torchao, a front has PyTorch's values, but for last bits.

    That for x86 leaves the operands of sums, and a result behind a linear layer, in float.
    """
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    net = with_norms().eval()
    if quantizer == "x86":
        net = nn.Sequential(*(layer for layer in net[:-2] if not isinstance(layer, Inverted)))
    exported = torch.export.export(net, (images(8),)).module()
    with torch.no_grad():
        prepared = prepare_pt2e(exported, _quantizer(quantizer))
        prepared(images(8))
        module = convert_pt2e(prepared)
        front = pmt.quantized(module)
        mine, its = front(images(8, seed=7)), module(images(8, seed=7))
    # Where one bit differs, those behind it may.
    assert float((mine - its).abs().max()) < 0.05 * float(its.abs().max())


def _quantizer(name):
    if name == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        return quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    return xnnpack.XNNPACKQuantizer().set_global(config)
