"""Models of Keras 3 as modules: its numbers, and steps that keep a budget."""

import os
import sys

import pytest

torch = pytest.importorskip("torch")

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

from torch.nn import functional  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import check_both_doors  # noqa: E402
from kit.export_agreement import Exported, Target, lower_training  # noqa: E402
from poetmodel.errors import InputError, MissingExtraError  # noqa: E402
from poetmodel.torch.onnx.step import make_onnx_step  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.large]
layers = keras.layers


def convolutions():
    """Return a network with batch norms, and a batch of images."""
    x = given = keras.Input((8, 8, 3))
    for width, stride in ((8, 1), (16, 2)):
        x = layers.Conv2D(width, 3, strides=stride, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(given, x), (torch.randn(4, 8, 8, 3), torch.randint(0, 10, (4,)))


def sequences():
    """Return a network of an embedding and two recurrent layers, and a batch of tokens."""
    given = keras.Input((5,), dtype="int32")
    x = layers.GRU(8, return_sequences=True)(layers.Embedding(20, 8)(given))
    x = layers.Dense(4)(layers.LSTM(8)(x))
    return keras.Model(given, x), (torch.randint(0, 20, (3, 5)), torch.randint(0, 4, (3,)))


def two_inputs():
    """Return a functional network with two inputs, which it names, and a batch of both."""
    first, second = keras.Input((8,), name="first"), keras.Input((6,), name="second")
    parts = [layers.Dense(5, activation=a)(x) for a, x in (("relu", first), ("tanh", second))]
    x = layers.Dense(3)(layers.Concatenate()(parts))
    model = keras.Model({"first": first, "second": second}, x)
    return model, (torch.randn(4, 8), torch.randn(4, 6), torch.randint(0, 3, (4,)))


class Own(keras.Model):
    """A network that relies on Keras to set its layers' training mode."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8)
        self.norm = layers.BatchNormalization()
        self.outer = layers.Dense(3)

    def call(self, x):
        """Return logits."""
        return self.outer(self.norm(self.inner(x)))


def own():
    """Return a network of a class of its own that was called once, and a batch."""
    model, x = Own(), torch.randn(6, 4)
    model(x)
    return model, (x, torch.randint(0, 3, (6,)))


MODELS = {
    "convolutions": convolutions,
    "sequences": sequences,
    "two inputs": two_inputs,
    "own": own,
}


def module(name):
    """Return a model of Keras, its module, and a batch."""
    keras.utils.set_random_seed(0)
    model, inputs = MODELS[name]()
    return model, pmt.from_keras(model), inputs


def called(model, inputs, *, training):
    """Return Keras's results for inputs."""
    given = dict(zip(("first", "second"), inputs, strict=True)) if len(inputs) > 1 else inputs[0]
    return model(given, training=training)


@pytest.mark.parametrize("name", MODELS)
def test_module_is_the_model(name):
    """Outputs, gradients and running statistics are Keras', and both train the same tensors."""
    model, mine, (*x, y) = module(name)
    assert torch.equal(mine.eval()(*x), called(model, x, training=False))
    before = [variable.value.detach().numpy().copy() for variable in model.non_trainable_variables]
    functional.cross_entropy(mine.train()(*x), y).backward()
    found = [parameter.grad.clone() for parameter in mine.parameters()]
    after = [variable.value.detach().numpy().copy() for variable in model.non_trainable_variables]
    for variable, value in zip(model.non_trainable_variables, before, strict=True):
        variable.assign(value)
    mine.zero_grad()
    functional.cross_entropy(called(model, x, training=True), y).backward()
    assert all(map(torch.equal, found, (v.value.grad for v in model.trainable_variables)))
    for variable, value in zip(model.non_trainable_variables, after, strict=True):
        if "seed" not in variable.path:
            assert variable.value.numpy() == pytest.approx(value, rel=1e-6, abs=1e-7)
    torch.optim.SGD(mine.parameters(), lr=0.1).step()
    assert torch.equal(mine.eval()(*x), called(model, x, training=False))


@pytest.mark.parametrize("name", MODELS)
def test_compile_and_backend_have_eager_bits(name):
    """A compiled step, and a compiled module, have the numbers of the module itself."""
    _, mine, inputs = module(name)
    check_both_doors(mine, functional.cross_entropy, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_c_trains_as_keras(name, tmp_path):
    """Exported C has the losses of three steps of the module, in single precision."""
    _, mine, inputs = module(name)
    step = lower_training((mine, functional.cross_entropy, inputs), "sgd", name="keras")
    *x, y = inputs
    exported = Exported(step, tmp_path).run([inputs], 3, target=Target.HOST)
    updates = torch.optim.SGD(mine.parameters(), lr=0.01)
    for loss in exported.losses.values():
        updates.zero_grad()
        expected = functional.cross_entropy(mine(*x), y)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        updates.step()


def ended(*end):
    """Return a model of two dense layers, the first nested, and the given end."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((6,)), keras.Sequential([layers.Dense(5)]), layers.Dense(4), *end], name="net"
    )


ENDINGS = {
    "layer": lambda: ended(layers.Softmax()),
    "activation": lambda: ended(layers.Activation("sigmoid")),
    "dense": lambda: ended(layers.Dense(4, activation="log_softmax")),
    "nested": lambda: keras.Sequential([keras.Input((6,)), ended(layers.Softmax())]),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_loss_takes_what_the_model_ends_in(name):
    """With logits, a step has the input of the last activation; the model's output is unchanged."""
    model, x = ENDINGS[name](), torch.randn(3, 6)
    model(x)
    mine, whole = pmt.from_keras(model, logits=True), model(x)
    given = mine(x)
    through = {"activation": torch.sigmoid, "dense": lambda z: functional.log_softmax(z, -1)}
    assert not torch.allclose(given, whole)
    assert torch.equal(through.get(name, lambda z: functional.softmax(z, -1))(given), whole)
    assert torch.equal(mine.eval()(x), whole)
    assert torch.equal(model(x, training=True), whole)
    inputs = (x, torch.randint(0, 4, (3,)))
    mine.train()
    with pmt.compile(mine, functional.cross_entropy, inputs, ram="100%", device="rpi4b") as step:
        expected = functional.cross_entropy(given, inputs[1])
        assert step(*inputs) == pytest.approx(expected.item(), rel=1e-6)


def shared():
    """Return a model that uses its last layer twice."""
    given, layer = keras.Input((4,)), layers.Dense(4, activation="softmax")
    return keras.Model(given, layer(layer(given)), name="net")


@pytest.mark.parametrize("make", [ended, shared, lambda: own()[0]], ids=["none", "shared", "own"])
def test_logits_need_an_end_that_a_loss_can_take(make, told):
    """A model without such an end, or whose last layer is used elsewhere too, is refused."""
    model = make()
    model.name = "net"
    with told.raises(InputError):
        pmt.from_keras(model, logits=True)


@pytest.mark.filterwarnings("ignore")  # Keras and PyTorch's exporter warn of themselves
def test_onnx_file_of_keras_leaves_its_end_to_the_loss(tmp_path):
    """``--loss`` finds the softmax of a file that Keras exports, as that of any other."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model, x = ended(layers.Softmax()), torch.randn(2, 6)
    model(x)
    path = tmp_path / "net.onnx"
    model.export(str(path), format="onnx", verbose=False)
    mine, _, _ = make_onnx_step(str(path), "cross-entropy", load_function=str, batch=2)
    assert torch.allclose(functional.softmax(mine(x), -1), model(x))
    assert torch.allclose(mine.eval()(x), model(x))


def test_dropout_draws_anew():
    """Layers without a seed draw from PyTorch's generator, in a compiled step too."""
    given = keras.Input((64,))
    mine = pmt.from_keras(keras.Model(given, layers.Dropout(0.5)(layers.Dense(64)(given))))
    x = torch.randn(2, 64)
    assert not torch.equal(mine(x), mine(x))
    inputs = (x, torch.randn(2, 64))
    with pmt.compile(mine, functional.mse_loss, inputs, ram="100%", device="rpi4b") as step:
        assert step.verify().equal


def net(*parts, **given):
    """Return a network of some layers on rows of four."""
    return keras.Sequential([keras.Input(**{"shape": (4,), **given}), *parts], name="net")


REFUSED = {
    "no model": lambda: 3,
    "not built": lambda: keras.Sequential([layers.Dense(2)], name="net"),
    "seeded": lambda: net(layers.Dropout(0.1, seed=1, name="drop")),
    "losses": lambda: net(layers.Dense(2, kernel_regularizer="l2")),
    "losses of outputs": lambda: net(layers.Dense(2, activity_regularizer="l2")),
    "constraints": lambda: net(layers.Dense(2, kernel_constraint="non_neg", name="fc")),
    "stateful": lambda: net(layers.LSTM(3, stateful=True, name="rnn"), shape=(5, 4), batch_size=2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_taken(case, told):
    """The error states fault and remedy."""
    with told.raises(InputError):
        pmt.from_keras(REFUSED[case]())


class Adding(layers.Layer):
    """A layer that adds a loss when it is called."""

    def call(self, x):
        """Return its input."""
        self.add_loss(keras.ops.mean(x))
        return x


def test_losses_and_frozen_layers_are_seen_in_a_call(told):
    """A loss that a call adds is refused during training, and so are layers frozen since."""
    model = net(layers.Dense(4, name="fc"), Adding())
    mine, x = pmt.from_keras(model), torch.randn(2, 4)
    assert torch.equal(mine.eval()(x), model(x))
    with told.raises(InputError, "adds"):
        mine.train()(x)
    model.layers[0].trainable = False
    with told.raises(InputError, "frozen"):
        mine(x)


@pytest.mark.parametrize("train", [False, True], ids=["evaluate", "train"])
def test_layers_of_equal_shapes_that_swap_freezing_are_refused(train, told):
    """The numbers of trainable and frozen variables stay, but their order changes."""
    model = net(layers.Dense(4, name="first"), layers.Dense(4, name="second"))
    first, second = model.layers
    second.trainable = False
    keras_module, x = pmt.from_keras(model).train(train), torch.randn(2, 4)
    output = keras_module(x)
    assert torch.equal(output, model(x))
    first.trainable, second.trainable = False, True
    with told.raises(InputError):
        keras_module(x)
    first.trainable, second.trainable = True, False
    assert torch.equal(keras_module(x), output)


@pytest.mark.parametrize("way", ["eager", "compile"])
@pytest.mark.parametrize("layer", ["GaussianNoise", "SpatialDropout1D"])
def test_layers_that_draw_from_seeds_of_keras_are_refused(layer, way, told):
    """Their seed would stay as it is: each step would draw the same. They may evaluate."""
    given = keras.Input((6, 8))
    hidden = getattr(layers, layer)(0.5, name="noise")(given)
    mine = pmt.from_keras(keras.Model(given, layers.Dense(2)(hidden), name="net"))
    x = torch.randn(2, 6, 8)
    assert torch.equal(mine.eval()(x), mine(x))
    mine.train()
    with told.raises(InputError):
        if way == "eager":
            mine(x)
        else:
            pmt.compile(mine, functional.mse_loss, (x, torch.randn(2, 6, 2)), ram="100%")


def test_number_of_inputs_is_checked():
    """A functional model has a number of inputs."""
    _, mine, (x, *_) = module("two inputs")
    with pytest.raises(InputError, match="expected 2 inputs, got 1"):
        mine(x)


def test_missing_package_is_said(monkeypatch, told):
    """One sentence with how to get it."""
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setattr("poetmodel.torch.errors.find_spec", lambda _: None)
    with told.raises(MissingExtraError):
        pmt.from_keras(3)


def test_another_back_end_is_refused(monkeypatch, told):
    """The variable to set is named; no other back end is installed here."""
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with told.raises(InputError):
        pmt.from_keras(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
