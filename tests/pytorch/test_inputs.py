"""Batches: mappings of any type, losses in outputs, and results of a step with named inputs."""

import copy
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, find_differences
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule
from poetmodel.torch.capturing.inputs import OutputStructure, flatten, unflatten

nn = torch.nn


class Encoding(UserDict):
    """Like the batches of tokenizers: items are attributes, and there is more beside them."""

    def __init__(self, data, lengths=None):
        super().__init__(data)
        self.lengths = lengths

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Fixed(Mapping):
    """A mapping that cannot be changed, and is not made of a dict."""

    def __init__(self, *items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


BATCHES = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "encoding": lambda items: Encoding(items, lengths=[4]),
    "defaultdict": lambda items: defaultdict(list, items),
    "proxy": lambda items: MappingProxyType(dict(items)),
    "fixed": lambda items: Fixed(*dict(items).items()),
}


class Output(OrderedDict):
    """Like the outputs of transformers: items are attributes, too, and None is omitted."""

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Cache:
    """Like the caches of language models."""

    def __init__(self, keys):
        self.keys = keys


@dataclass(eq=False)
class Named(Output):
    """An output with names."""

    loss: Any = None
    logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None


Pair = namedtuple("Pair", ("loss", "logits"))  # noqa: PYI024 - what users have


class Result:
    """An object of a user."""

    def __init__(self, loss, logits):
        self.loss, self.logits, self.count = loss, logits, 2


RESULTS = {
    "dataclass": lambda loss, y: Named(loss=loss, logits=y, hidden_states=(y * 2, y[:1])),
    "dict": lambda loss, y: {"logits": y, "loss": loss, "size": 3, "parts": [y + 1, None]},
    "tuple": lambda loss, y: (loss, y, (y.sum(), "words")),
    "list": lambda loss, y: [loss, {"y": y}],
    "named tuple": Pair,
    "object": Result,
    "tensor": lambda loss, _: loss,
    "twice": lambda loss, y: {"loss": loss, "again": loss, "y": y, "same": y},
}
QUICK_RESULTS = ("dataclass", "object")


class Model(nn.Module):
    """Batch norm between two layers, and dropout; its results are rows."""

    def __init__(self, result=RESULTS["dict"]):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.result = result

    def forward(self, x, labels=None, scale=None):
        """Return the output, with a loss where there are labels."""
        y = self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5, self.training))
        if scale is not None:
            y = y * scale
        loss = None if labels is None else nn.functional.cross_entropy(y, labels)
        return self.result(loss, y)


def batch(size=5):
    """Return a batch."""
    return {"x": torch.randn(size, 4), "labels": torch.randint(0, 3, (size,))}


def flat(value):
    """Return all that is in an output, with its types, in order."""
    if isinstance(value, Result):
        value = vars(value)
    if isinstance(value, dict):
        return [type(value), *(leaf for key in value for leaf in (key, *flat(value[key])))]
    if isinstance(value, tuple | list):
        return [type(value), *(leaf for item in value for leaf in flat(item))]
    return [value]


def agree(one, other):
    """Return whether two outputs are equal bit for bit."""
    pairs = zip(flat(one), flat(other), strict=True)
    return type(one) is type(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


def loss_of(output):
    """Return the loss of an output."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"]
    return getattr(output, "loss", None) if hasattr(output, "loss") else output[0]


def compiled(model, rows, **options):
    """Return a step that is not measured."""
    return pmt.compile(model, None, rows, **{"ram": "100%", "device": "rpi4b", **options})


class ByBatch(nn.Module):
    """Expects a whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch):
        """Return the loss."""
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["labels"])


def same_as_eager(step, model, expected, *batch):
    """Return whether a step has the loss and gradients of eager."""
    model.zero_grad()
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = step(*batch)
    return torch.equal(loss, expected.detach()) and all(
        map(torch.equal, gradients, [p.grad for p in model.parameters()])
    )


@pytest.mark.parametrize("kind", mark_seeds_except(BATCHES, ["fixed"], ["dict", "encoding"]))
def test_mappings_are_batches(kind):
    """A model gets one as a dict, or its items where forward has its keys."""
    own = batch()
    first = BATCHES[kind](own)
    model = ByBatch()
    step = compile_keep_all(model, None, (first,))
    assert all(first[key] is value for key, value in own.items())
    for _ in range(2):
        other = BATCHES[kind](batch())
        assert same_as_eager(step, model, model(other), other)
    assert step.verify(other).equal
    named = Model().eval()
    step = compile_keep_all(named, None, (first,))
    assert same_as_eager(step, named, named(**first)["loss"], first)


def test_mappings_within_others_are_batches_too():
    """Nested in lists, tuples and mappings, beside a target."""

    def nested(parts, batch, more):
        return parts[0](batch["x"]) + more[0]["inner"]["z"]

    x, y, z = torch.randn(3, 3, 4)
    inputs = (UserDict(x=x), [{"inner": Fixed(("z", z))}], y)
    model = FunctionModule(nested, nn.Linear(4, 4))
    step = compile_keep_all(model, nn.functional.mse_loss, inputs)
    expected = nn.functional.mse_loss(model(*inputs[:2]), y)
    assert same_as_eager(step, model, expected, *inputs)
    assert step.verify().equal


@pytest.mark.parametrize("kind", mark_seeds_except(["dict", "encoding"], ["encoding"]))
def test_a_batch_is_given_by_name_where_forward_takes_any_keyword(kind):
    """As in ``forward(x, y=None, **kwargs)``; models that expect the batch itself still get it."""

    class Open(Model):
        def forward(self, x=None, labels=None, **kwargs):
            return super().forward(x, labels, kwargs.get("scale"))

    class Whole(Model):
        def forward(self, batch, **kwargs):
            return super().forward(**batch, **kwargs)

    given_ = BATCHES[kind]({**batch(), "scale": torch.tensor(2.0)})
    for model in (Open().eval(), Whole().eval()):
        step = compile_keep_all(model, None, (given_,))
        expected = model(given_) if isinstance(model, Whole) else model(**given_)
        assert same_as_eager(step, model, expected["loss"], given_)


def test_flat_inputs_come_back():
    """In their order; mappings are returned as dicts, named inputs in the order of their names."""
    flat, form = flatten(({"b": 1, "a": 2}, [UserDict(c=3)], 4))
    assert flat == [1, 2, 3, 4]
    assert unflatten([10, 20, 30, 40], form) == ({"b": 10, "a": 20}, [{"c": 30}], 40)
    assert flatten({"b": 1, "a": 2})[0] == [2, 1]


# -- what a step returns -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", mark_seeds_except(RESULTS, QUICK_RESULTS, ["tuple", "dict", "named tuple"])
)
def test_a_step_returns_what_the_model_does(kind):
    """Same type and values, detached; gradients and buffers are those of eager.

    A batch in a tuple gives the loss of any output: no other tensor is held until the end.
    """
    model = Model(RESULTS[kind])
    twin = copy.deepcopy(model)
    step = compiled(model, batch())
    for _ in range(2):
        rows = batch()
        state = torch.get_rng_state()
        expected = twin(**rows)
        loss_of(expected).backward()
        torch.set_rng_state(state)
        found = step(**rows)
        assert agree(found, expected)
        assert not any(leaf.requires_grad for leaf in flat(found) if isinstance(leaf, torch.Tensor))
        grads = [[parameter.grad for parameter in net.parameters()] for net in (model, twin)]
        assert all(map(torch.equal, *grads))
        assert all(map(torch.equal, model.buffers(), twin.buffers()))
    assert step.verify().equal
    assert step.verify(**rows).equal
    assert torch.equal(compiled(model.eval(), (rows,))(rows), loss_of(model(**rows)))


def test_results_of_a_call_are_its_own():
    """No later step changes them, although memory of the step is reused.

    A parameter, a buffer or an input among them has no autograd; a cache is omitted.
    """
    model = Model(lambda loss, y: (loss, y, y[0], model.norm.running_mean.clone()))
    step = compiled(model, batch())
    found = step(**batch())
    before = copy.deepcopy(found)
    step(**batch())
    assert agree(found, before)
    model = Model(lambda loss, y: (loss, model.last.weight, model.norm.running_mean, y))
    step = compiled(model, batch())
    _, weight, mean, _ = step(**batch())
    assert torch.equal(weight, model.last.weight)
    assert torch.equal(mean, model.norm.running_mean)
    assert not weight.requires_grad
    assert step.verify().equal
    model = Model(lambda loss, y: Named(loss=loss, logits=y, past_key_values=Cache(y)))
    found = compiled(model, batch())(**batch())
    assert found.past_key_values is None
    assert list(found) == ["loss", "logits"]


def test_batches_come_by_name():
    """As keywords or as one mapping of any type, in any order; beside a target too."""
    model = Model().eval()
    rows = batch()
    step = compiled(model, UserDict(rows))
    first = step(**rows)
    for other in (rows, UserDict(rows), OrderedDict(reversed(rows.items()))):
        assert agree(step(other), first)
    assert agree(step(**dict(reversed(rows.items()))), first)
    with pytest.raises(pmt.CaptureError, match="labels, x missing"):
        step()
    whole = ByBatch()
    step = compile_keep_all(whole, None, (Encoding(rows),))
    for other in (Encoding(rows), OrderedDict(rows), rows):
        assert same_as_eager(step, whole, whole(Encoding(rows)), other)
    with pytest.raises(pmt.CaptureError, match=r"nested as .*'labels': .*, got .*'z'"):
        step(Encoding({**rows, "z": rows["x"]}))
    inputs = {"x": torch.randn(3, 4), "scale": 2.0}, torch.randn(3, 3)

    def loss_fn(output, target):
        return (output["logits"] - target).abs().mean()

    step = compile_keep_all(model, loss_fn, inputs)
    assert same_as_eager(step, model, loss_fn(model(**inputs[0]), inputs[1]), *inputs)


def test_other_batches_are_compiled_for_if_asked():
    """With other names; other sizes are as without names."""
    model = Model()
    step = compiled(model, batch(), dynamic="retrace")
    for rows in (batch(), {**batch(), "scale": torch.tensor(2.0)}, batch()):
        state = torch.get_rng_state()
        expected = copy.deepcopy(model)(**rows)
        torch.set_rng_state(state)
        assert agree(step(**rows), expected)


@pytest.mark.slow
def test_results_count_against_the_budget(tmp_path):
    """Results are held until the end of the step, with recomputation and paging around them.

    With an optimizer, the step returns the model's results before the updates.
    """

    class Wide(Model):
        def forward(self, x, labels=None):
            y = x
            for _ in range(6):
                y = self.first(y).relu()[:, :4].sin()
            return {"loss": (y.sum(1) - labels).square().mean(), "y": y, "wide": y.repeat(1, 8)}

    rows = {"x": torch.randn(2000, 4), "labels": torch.randn(2000)}
    model = Wide()
    step = compiled(model, rows, ram="70%", storage=tmp_path)
    certificate = step.verify()
    assert certificate.equal
    assert certificate.within_budget
    assert agree(step(**rows), model(**rows))
    alone = compiled(model, (rows,), ram="100%")
    assert compiled(model, rows).budget_bytes >= alone.budget_bytes + 2000 * 8 * 4
    model = Model(lambda loss, y: (loss, y, model.last.weight))
    model.eval()
    before = model.last.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compiled(model, batch(), optimizer=optimizer)
    assert step.verify().equal
    _, _, weight = step(**batch())
    assert torch.equal(weight, before)
    assert not torch.equal(weight, model.last.weight)


LEAVES = st.one_of(
    st.builds(torch.full, st.just((2,)), st.integers(0, 9)), st.none(), st.integers(), st.text()
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Named, loss=inner, logits=inner),
    ),
    max_leaves=8,
)


@settings(max_examples=30)
@given(output=NESTS)
def test_a_form_gives_back_what_it_took(output):
    """With the same types, for all nestings; new tensors have the same positions, by name."""
    loss = torch.zeros(())
    form, others = OutputStructure.from_output({"loss": loss, "rest": output}, loss)
    assert len(form.names) == len(others)
    made = form.build(loss, [value + 1 for value in others])
    again, found = OutputStructure.from_output(made, loss)
    assert again.names == form.names
    assert all(torch.equal(a, b + 1) for a, b in zip(found, others, strict=True))
    assert agree(form.build(loss, others), {"loss": loss, "rest": output})
    form, others = OutputStructure.from_output({"loss": loss, "deep": [(loss + 1, loss)]}, loss)
    assert form.names == ("deep[0][0]",)
    built = form.build(loss * 2, others)
    assert agree(list(form.tensors_by_name(built).values()), [loss * 2, *others])


# -- what is refused -----------------------------------------------------------------------------
X, LABELS = torch.ones(5, 4), torch.zeros(5, dtype=torch.long)
A, B = torch.ones(2, 3, 4)


@pytest.fixture(scope="module")
def kept():
    """Return steps with and without names that tests do not run."""
    torch.manual_seed(1)
    return compiled(Model(), batch()), compile_keep_all(
        nn.Linear(4, 4), nn.functional.mse_loss, (A, B)
    )


@pytest.mark.parametrize("door", ["step", "verify"])
@pytest.mark.parametrize(
    ("inputs", "named", "words"),
    [
        ((), {"x": X}, r"\(labels, x\), and labels missing"),
        ((), {"x": X, "labels": LABELS, "scale": 1.0}, "and scale new"),
        ((), {"x": X, "y": LABELS}, "labels missing and y new"),
        ((X, LABELS), {}, r"by name.*step\(\*\*batch\); got 2 without"),
        (({"x": X},), {"labels": LABELS}, "by name.*; got labels"),
        ((), {"x": X[:2], "labels": LABELS}, r"x was float32 \[5, 4\].*\[2, 4\]"),
        ((), {"x": [X], "labels": LABELS}, "nested as"),
        ((), {"x": X.numpy(), "labels": LABELS}, "x: expected.*of numpy"),
        ((A,), {"target": B}, "expected inputs without names.*got target"),
        ((A[:2], B[:2]), None, r"inputs\[0\] was float32 \[3, 4\].* and is float32 \[2, 4\]"),
        ((A.double(), B), None, r"is float64 \[3, 4\]"),
        ((A,), None, r"expected 2 inputs \(the target last\), got 1"),
        ((A.t().contiguous().t(), B), None, r"strides \[1, 3\]"),
        ((A, B.numpy()), None, r"inputs\[1\]: .* ndarray of numpy; convert"),
        ((A.to_sparse(), B), None, r"inputs\[0\]: .*dense"),
        (({"a": A}, B), None, r"nested as \(\*, \*\), got \(\{'a': \*"),
    ],
)
def test_other_inputs_are_refused(door, inputs, named, words, kept):
    """Names, numbers of inputs, shapes, types and nesting: old and new values."""
    step = kept[named is None or "target" in named]
    call = step if door == "step" else step.verify
    with pytest.raises(pmt.CaptureError, match=words):
        call(*inputs, **named or {})


@pytest.mark.parametrize(
    ("result", "inputs", "loss_fn", "words"),
    [
        ("dict", {"x": torch.ones(2, 4)}, None, "no loss .*dict.*labels"),
        ("dict", ({"x": torch.ones(2, 4)},), None, "no loss in the dict"),
        ("dict", {"x": torch.ones(2, 4), "y": 1}, None, "unexpected keyword argument 'y'"),
        ("dict", {"labels": torch.ones(2)}, None, "missing a required argument: 'x'"),
        ("dict", {"x": X}, nn.functional.mse_loss, "loss_fn: a batch of named inputs"),
        ("dict", {1: X}, None, "names of parameters of forward as keys, got 1"),
        ("dict", {}, None, "expected inputs"),
        (lambda loss, _: Pair({"mean": loss}, 1), (batch(),), None, "a tensor, got a dict"),
        (lambda *_: Pair(3.0, 1), (batch(),), None, "a loss that is a tensor, got a float"),
    ],
)
def test_batches_that_do_not_fit_are_refused(result, inputs, loss_fn, words):
    """The error states the fault of their names, or of the loss of an output."""
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(Model(RESULTS.get(result, result)), loss_fn, inputs)


# -- tensors with operations of their own --------------------------------------------------------
class Plain(torch.Tensor):
    """Only Python sees that it is another class."""


def kinds_of_tensors():
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
def test_tensors_with_operations_of_their_own_are_refused(kind):
    """At compile and at a step, as inputs and as parameters."""
    value = kinds_of_tensors()[kind]
    model, loss_fn, (x, y) = nn.Linear(4, 4), nn.functional.mse_loss, torch.randn(2, 3, 4)
    with pytest.raises(pmt.CaptureError, match=rf"inputs\[0\]: expected a .* tensor, got {kind}"):
        compile_keep_all(model, loss_fn, (value, y))
    step = compile_keep_all(model, loss_fn, (x, y))
    with pytest.raises(pmt.CaptureError, match=rf"inputs\[0\]: expected a .* tensor, got {kind}"):
        step(value, y)
    if kind == "a TwoTensor":
        model.weight = nn.Parameter(type(value)(*[model.weight.detach()] * 2))
        with pytest.raises(pmt.CaptureError, match="weight is a TwoTensor"):
            compile_keep_all(model, loss_fn, (x, y))
        with pytest.raises(pmt.CaptureError, match=r"weight was .* and is a TwoTensor"):
            step(x, y)
    else:  # gradients are plain tensors, as those of eager, whatever the inputs are
        step(x.as_subclass(Plain), y)
        assert type(model.weight.grad) is torch.Tensor


# -- models that are wrapped -------------------------------------------------------------------
class DistributedDataParallel(nn.Module):
    """Named as PyTorch's, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Renamed(DistributedDataParallel):
    """One of a user's own."""


def compiled_forward():
    """Return a module whose forward was compiled."""
    module = nn.Linear(4, 4)
    module.forward = torch.compile(module.forward, backend="eager")
    return nn.Sequential(module)


def compiled_in_place():
    """Return a module that was compiled in place."""
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
         r"is compiled \(torch.compile\).*_orig_mod"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager")),
         r"module '0' is compiled .*pass the original module"),
        (compiled_in_place, "the model is compiled .*not compiled"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), r"a DataParallel, .*\(model\.module\)"),
        (lambda: DistributedDataParallel(nn.Linear(4, 4)),
         r"a DistributedDataParallel, .*\(model\.module\)"),
        (lambda: Renamed(nn.Linear(4, 4)), r"a Renamed, .*\(model\.module\)"),
        (compiled_forward, "forward of 0 is compiled"),
    ],
)  # fmt: skip
def test_wrapped_models_are_refused(wrapped, words):
    """The error names the model to pass instead; a compiled loss cannot be captured either."""
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(wrapped(), nn.functional.mse_loss, inputs)
    with pytest.raises(pmt.CaptureError, match="loss_fn is compiled"):
        pmt.trace(nn.Linear(4, 4), torch.compile(nn.functional.mse_loss, backend="eager"), inputs)


@pytest.mark.parametrize("backend", mark_seeds_except(["eager", "aot_eager"], ["eager"]))
def test_a_compiled_function_inside_is_captured_or_refused(backend):
    """PyTorch 2.14 captures it, with eager's results; before, the line that calls it is named.

    So is what ``torch.compiler.disable`` excludes.
    """

    class Kept(nn.Linear):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    class Inside(nn.Linear):
        def forward(self, x):
            return act(super().forward(x))

    act = torch.compile(torch.relu, backend=backend)
    own = Inside(4, 4), nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    try:
        step = pmt.compile(*own, ram="100%", device="rpi4b")
    except pmt.CaptureError as error:
        step, refusal = None, str(error)
    if step is not None:
        assert find_differences(step, *own) == []
    else:
        assert re.search(r"at .*\(return act", refusal)
    loss_fn = nn.functional.mse_loss
    for model, loss in (
        (Kept(4, 4), loss_fn), (nn.Linear(4, 4), torch.compiler.disable(loss_fn))
    ):  # fmt: skip
        with pytest.raises(pmt.CaptureError, match=r"torch\.compiler\.disable"):
            compile_keep_all(model, loss, own[2])
