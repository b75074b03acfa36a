"""Batches: mappings of any type, whatever the order of their keys, and losses in outputs."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.rotation import quick  # noqa: E402
from poetmodel.torch.capturing.inputs import flatten, unflatten  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


class Encoding(UserDict):
    """Like the batches of tokenizers: items are attributes, and there is more beside them."""

    def __init__(self, data: Any, lengths: Any = None) -> None:
        super().__init__(data)
        self.lengths = lengths

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Fixed(Mapping):
    """A mapping that cannot be changed, and is not made of a dict."""

    def __init__(self, *items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Output(OrderedDict):
    """Like the outputs of models: items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Result:
    """An output that is no mapping."""

    loss: Any
    logits: Any = None


Pair = namedtuple("Pair", ("loss", "logits"))  # noqa: PYI024 - what users have

BATCHES: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "encoding": lambda items: Encoding(items, lengths=[4]),
    "defaultdict": lambda items: defaultdict(list, items),
    "proxy": lambda items: MappingProxyType(dict(items)),
    "fixed": lambda items: Fixed(*dict(items).items()),
    "output": Output,
}


class ByBatch(nn.Module):
    """Takes a whole batch, and wants its type."""

    def __init__(self, kind: type, result: Callable[[Any], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        self.result = result

    def forward(self, batch: Any) -> Any:
        """Return the loss."""
        assert type(batch) is self.kind
        return self.result((self.layer(batch["x"]) - batch["y"]).square().mean())


class ByName(nn.Module):
    """Takes what is in a batch by name, as models of sentences do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any = None, scale: Any = None, y: Any = None) -> Any:
        """Return an output with the loss, where there is a target."""
        logits = self.layer(x) if scale is None else self.layer(x) * scale
        return Output(loss=None if y is None else (logits - y).square().mean(), logits=logits)


def items() -> dict[str, Any]:
    """Return what is in a batch."""
    return {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}


def same_as_eager(step: pmt.Step, model: Any, expected: Any, *batch: Any) -> bool:
    """Return whether a step gives the loss and gradients of eager."""
    model.zero_grad()
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = step(*batch)
    return torch.equal(loss, expected.detach()) and all(
        map(torch.equal, gradients, [p.grad for p in model.parameters()])
    )


@pytest.mark.parametrize("kind", quick(BATCHES, ("dict", "encoding", "fixed")))
def test_mappings_are_batches(kind: str) -> None:
    """The model gets one of the type that was given, with the values of the call."""
    torch.manual_seed(1)
    own = items()
    batch = BATCHES[kind](own)
    model = ByBatch(type(batch))
    step = keep_all(model, None, (batch,))
    assert all(batch[key] is value for key, value in own.items())
    for _ in range(2):
        other = BATCHES[kind](items())
        assert same_as_eager(step, model, model(other), other)
    assert step.verify(other).equal


def test_the_order_of_keys_is_irrelevant() -> None:
    """And so is the type of the mapping; other keys are refused."""
    torch.manual_seed(1)
    own = items()
    model = ByBatch(Encoding)
    step = keep_all(model, None, (Encoding(own),))
    turned = dict(reversed(own.items()))
    assert list(turned) != list(own)
    for batch in (Encoding(turned), OrderedDict(turned), turned):
        assert same_as_eager(step, model, model(Encoding(own)), batch)
    with pytest.raises(pmt.CaptureError, match=r"nested as .*'x': \*, 'y': \*.*, got .*'z'"):
        step(Encoding({**own, "z": own["x"]}))


def test_mappings_within_others_are_batches_too() -> None:
    """Nested in lists, tuples and mappings, beside a target."""

    class Nested(ByBatch):
        def forward(self, batch: Any, more: Any) -> Any:
            assert type(more[0]["inner"]) is Fixed
            return self.layer(batch["x"]) + more[0]["inner"]["z"]

    torch.manual_seed(1)
    z = torch.randn(3, 4)
    inputs = (UserDict(x=torch.randn(3, 4)), [{"inner": Fixed(("z", z))}], torch.randn(3, 4))
    model = Nested(UserDict)
    step = keep_all(model, nn.functional.mse_loss, inputs)
    expected = nn.functional.mse_loss(model(*inputs[:2]), inputs[2])
    assert same_as_eager(step, model, expected, *inputs)
    assert step.verify().equal


@pytest.mark.parametrize("kind", quick(BATCHES, ("dict", "encoding", "fixed")))
def test_a_batch_is_given_by_name_where_forward_has_its_keys(kind: str) -> None:
    """``model(**batch).loss``, as models of sentences are called."""
    torch.manual_seed(1)
    batch = BATCHES[kind](items())
    model = ByName()
    step = keep_all(model, None, (batch,))
    assert same_as_eager(step, model, model(**batch).loss, batch)


@pytest.mark.parametrize("kind", ["dict", "encoding"])
def test_a_batch_is_given_by_name_where_forward_takes_any_keyword(kind: str) -> None:
    """As ``forward(x, y=None, **kwargs)`` does; one that wants the batch itself still gets it."""
    torch.manual_seed(1)

    class Open(ByName):
        def forward(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
            return super().forward(x, kwargs.get("scale"), y)

    class Whole(ByName):
        def forward(self, batch: Any, **kwargs: Any) -> Any:
            return super().forward(**batch, **kwargs)

    batch = BATCHES[kind]({**items(), "scale": torch.tensor(2.0)})
    for model in (Open(), Whole()):
        step = keep_all(model, None, (batch,))
        expected = model(batch) if isinstance(model, Whole) else model(**batch)
        assert same_as_eager(step, model, expected.loss, batch)


def test_a_batch_by_name_beside_a_target() -> None:
    """The loss function gets the output as it is."""
    torch.manual_seed(1)
    model, y = ByName(), torch.randn(3, 4)
    batch = {"x": torch.randn(3, 4), "scale": 2.0}

    def loss_fn(output: Any, target: Any) -> Any:
        return (output.logits - target).abs().mean()

    step = keep_all(model, loss_fn, (batch, y))
    assert same_as_eager(step, model, loss_fn(model(**batch), y), batch, y)


@pytest.mark.parametrize(
    "result",
    [
        lambda loss: Output(loss=loss, logits=loss * 2),
        lambda loss: UserDict(loss=loss, logits=loss * 2),
        lambda loss: Result(loss=loss, logits=loss * 2),
        lambda loss: Pair(loss=loss, logits=loss * 2),
        lambda loss: {"logits": loss * 2, "loss": loss},
    ],
)
def test_the_loss_of_an_output_is_taken(result: Callable[[Any], Any]) -> None:
    """From a mapping or an object; nothing else of it is a result."""
    torch.manual_seed(1)
    batch = items()
    model = ByBatch(dict, result)
    step = keep_all(model, None, (batch,))
    plain = ByBatch(dict)
    plain.layer = model.layer
    assert same_as_eager(step, model, plain(batch), batch)


def test_an_output_without_a_loss_is_told() -> None:
    """A model that got no target has none."""
    batch = {"x": torch.randn(3, 4), "scale": torch.ones(1)}
    with pytest.raises(pmt.CaptureError, match="no loss in the Output"):
        keep_all(ByName(), None, (batch,))


@pytest.mark.parametrize("loss", [lambda loss: {"mean": loss}, lambda _: 3.0])
def test_a_loss_of_an_output_that_is_no_tensor_is_told(loss: Callable[[Any], Any]) -> None:
    """By its type, before anything runs."""
    model = ByBatch(dict, lambda value: Result(loss=loss(value)))
    with pytest.raises(pmt.CaptureError, match=r"a loss that is a tensor, got a (dict|float)"):
        keep_all(model, None, (items(),))


def test_a_mapping_that_cannot_be_made_is_told() -> None:
    """The error says what can be given in its place."""

    class Stubborn(Mapping):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            return X[key]

        def __iter__(self) -> Iterator[Any]:
            return iter(X)

        def __len__(self) -> int:
            return len(X)

    X = items()  # noqa: N806
    with pytest.raises(pmt.CaptureError, match="a Stubborn cannot be made with other values"):
        keep_all(ByBatch(Stubborn), None, (Stubborn(),))


def test_flat_inputs_come_back() -> None:
    """Values are in the order of sorted keys, mappings come back in their own order."""
    flat, form = flatten(({"b": 1, "a": 2}, [UserDict(c=3)], 4))
    assert flat == [2, 1, 3, 4]
    back = unflatten([20, 10, 30, 40], form)
    assert back == ({"b": 10, "a": 20}, [UserDict(c=30)], 40)
    assert list(back[0]) == ["b", "a"]


# -- tensors with operations of their own --------------------------------------------------------


class Named(torch.Tensor):
    """Only Python sees that it is another class."""


def kinds_of_tensors() -> dict[str, Any]:
    """Return tensors whose operations are their own."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(3, 4)
    return {
        "a nested tensor": torch.nested.nested_tensor([x[:1], x[1:]]),
        "torch.sparse_csr": x.to_sparse_csr(),
        "a TwoTensor": TwoTensor(x, x),
    }


@pytest.mark.parametrize("kind", ["a nested tensor", "torch.sparse_csr", "a TwoTensor"])
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_tensors_with_operations_of_their_own_are_refused(kind: str) -> None:
    """At compile and at a step, as inputs and as parameters."""
    value = kinds_of_tensors()[kind]
    model, loss_fn, (x, y) = nn.Linear(4, 4), nn.functional.mse_loss, torch.randn(2, 3, 4)
    with pytest.raises(pmt.CaptureError, match=rf"inputs\[0\]: expected a .* tensor, got {kind}"):
        keep_all(model, loss_fn, (value, y))
    step = keep_all(model, loss_fn, (x, y))
    with pytest.raises(pmt.CaptureError, match=rf"inputs\[0\]: expected a .* tensor, got {kind}"):
        step(value, y)
    if kind == "a TwoTensor":
        model.weight = nn.Parameter(type(value)(*[model.weight.detach()] * 2))
        with pytest.raises(pmt.CaptureError, match="weight is a TwoTensor"):
            keep_all(model, loss_fn, (x, y))
        with pytest.raises(pmt.CaptureError, match=r"weight was .* and is a TwoTensor"):
            step(x, y)


def test_gradients_are_plain_tensors() -> None:
    """As those of eager, whatever the inputs are."""
    model, (x, y) = nn.Linear(4, 4), torch.randn(2, 3, 4)
    step = keep_all(model, nn.functional.mse_loss, (x, y))
    step(x.as_subclass(Named), y)
    assert type(model.weight.grad) is torch.Tensor


# -- models that are wrapped -------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Named as PyTorch's, which needs a process group."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class Renamed(DistributedDataParallel):
    """One of a user's own."""


def compiled_forward() -> Any:
    """Return a module whose forward was compiled."""
    module = nn.Linear(4, 4)
    module.forward = torch.compile(module.forward, backend="eager")
    return nn.Sequential(module)


def compiled_in_place() -> Any:
    """Return a module that was compiled in place."""
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (
            lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
            r"is compiled \(torch.compile\).*_orig_mod",
        ),
        (
            lambda: nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager")),
            r"module '0' is compiled .*give the module that it was made of",
        ),
        (compiled_in_place, "the model is compiled .*not compiled"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), r"a DataParallel, .*\(model\.module\)"),
        (
            lambda: DistributedDataParallel(nn.Linear(4, 4)),
            r"a DistributedDataParallel, .*\(model\.module\)",
        ),
        (lambda: Renamed(nn.Linear(4, 4)), r"a Renamed, .*\(model\.module\)"),
        (compiled_forward, "forward of 0 is compiled"),
    ],
)
def test_wrapped_models_are_refused(wrapped: Callable[[], Any], words: str) -> None:
    """The error says what to give in their place."""
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(pmt.CaptureError, match=words):
        keep_all(wrapped(), nn.functional.mse_loss, inputs)


def test_a_compiled_loss_is_refused() -> None:
    """It cannot be captured either."""
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(pmt.CaptureError, match="loss_fn is compiled"):
        pmt.trace(nn.Linear(4, 4), torch.compile(nn.functional.mse_loss, backend="eager"), inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_inside_is_captured_or_refused(backend: str) -> None:
    """PyTorch 2.14 captures it, with eager's results; before, the line that calls it is named."""

    class Inside(nn.Linear):
        def forward(self, x: Any) -> Any:
            return act(super().forward(x))

    act = torch.compile(torch.relu, backend=backend)
    own = Inside(4, 4), nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    try:
        step = pmt.compile(*own, ram="100%", device="rpi4b")
    except pmt.CaptureError as error:
        step, refusal = None, str(error)
    if step is not None:
        assert differing(step, *own) == []
    else:
        assert re.search(r"called at .*\(return act.* is compiled", refusal)


def test_functions_that_are_kept_from_being_compiled_are_as_others() -> None:
    """``torch.compiler.disable`` changes nothing here."""

    class Kept(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    loss_fn = torch.compiler.disable(nn.functional.mse_loss)
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    step = keep_all(Kept(4, 4), loss_fn, inputs)
    assert step.verify().equal
