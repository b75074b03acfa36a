"""Steps of small networks, lowered and executed in double, against PyTorch's autograd."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from kit.elementwise_calls import UNARY
from kit.kernel_calls import call_operation, execute_steps
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.lowering.step import lower

ROWS, WIDTH = 4, 6


def real(*shape, seed=0):
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def between(function):
    """Return a function between two linear layers."""
    layers = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    if isinstance(function, nn.Module):
        layers["function_"] = function
    return FunctionModule(lambda own, x: own.second(function(own.first(x))), **layers)


def attention():
    """Return attention by two heads, written by hand, with a causal mask."""

    def attend(own, x):
        length = x.shape[1]
        parts = own.inside(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(later, float("-inf"))
        return own.outside((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return FunctionModule(
        attend, inside=nn.Linear(WIDTH, 3 * WIDTH), outside=nn.Linear(WIDTH, WIDTH)
    )


def words():
    """Return embeddings of words and places, and a block of BERT that sees no padding."""

    def classify(own, x):
        y = own.words(x) + own.places(torch.arange(x.shape[1]))
        return own.head(own.block(y, src_key_padding_mask=x == 0)[:, 0])

    block = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True)
    tables = {"words": nn.Embedding(11, 8, padding_idx=0), "places": nn.Embedding(5, 8)}
    return FunctionModule(classify, block=block, head=nn.Linear(8, 3), **tables)


LAYERS = (
    nn.Softmax(-1), nn.LogSoftmax(0), nn.LogSigmoid(), nn.PReLU(), nn.Softsign(), nn.CELU(),
    nn.RMSNorm(WIDTH, eps=2**-16),  # PyTorch rounds it to float
    nn.LayerNorm(WIDTH),
)  # fmt: skip
ACTIVATIONS = {str(layer): layer for layer in LAYERS}
OPERATORS = {
    name: partial(call_operation, operation)
    for name, operation in UNARY.items()
    if name != "sgn"  # its gradient, a tensor of zeros, has no kernel
}
FUNCTIONS = {
    "power": lambda x: x.abs() ** 1.5,
    "roots": lambda x: (x * x + 1).sqrt() + (x * x + 1).rsqrt(),
    "quotients": lambda x: 1 / (x * x + 1) + x / (x.exp() + 1),
    "logarithms": lambda x: (x.exp() + 1).log() + x.abs().log1p(),
    "deviations": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1),
    "variances": lambda x: x / (x.var(0, unbiased=False) + 1e-5).sqrt(),
    "extremes": lambda x: torch.maximum(x, -x) + torch.minimum(x, 2 * x),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.0),
    "least": lambda x: x - x.amax(-1, keepdim=True) + x.amin(0),
    "first extreme": lambda x: x - x.max(-1, keepdim=True)[0],
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "normalized": lambda x: functional.normalize(x, dim=-1),
    "cosines": lambda x: x * functional.cosine_similarity(x, x + 1, dim=-1)[:, None],
    "sums so far": lambda x: x.cumsum(-1),
    "chunks": lambda x: torch.cat([2 * part for part in x.chunk(2, -1)], -1),
    "glu": lambda x: torch.cat([functional.glu(x), functional.glu(x)], -1),
    "rolled": lambda x: x.roll(1, -1) + x.flip(0),
    "lower triangle": lambda x: x.tril(),
    "stacked": lambda x: torch.stack([x, x * x]).sum(0),
    "repeated": lambda x: x.repeat(1, 2)[:, 1 : WIDTH + 1],
    "gathered": lambda x: x.gather(1, torch.zeros(ROWS, WIDTH, dtype=torch.int64) + 2),
    "indexed": lambda x: x[:, torch.tensor([0, 1, 1, 3, 5, 0])],
    "turned": lambda x: (x.t().contiguous() * x.t()).t() + x.t().exp().t(),
    "products": lambda x: torch.einsum("bi,bj->bj", x, x) + (x @ x.t()) @ x,
}
LOSSES = {
    "l1": (functional.l1_loss, real(ROWS, WIDTH, seed=1)),
    "smooth l1": (functional.smooth_l1_loss, real(ROWS, WIDTH, seed=1)),
    "huber": (functional.huber_loss, real(ROWS, WIDTH, seed=1)),
    "sum of squares": (nn.MSELoss(reduction="sum"), real(ROWS, WIDTH, seed=1)),
    "squares": (lambda y, t: functional.mse_loss(y, t, reduction="none").sum(), real(ROWS, WIDTH)),
    "probabilities": (
        lambda y, t: functional.binary_cross_entropy(y.sigmoid(), t),
        real(ROWS, WIDTH).sigmoid(),
    ),
    "logits": (
        nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, WIDTH + 1)),
        real(ROWS, WIDTH).sigmoid(),
    ),
    "divergence": (
        lambda y, t: functional.kl_div(y.log_softmax(-1), t, reduction="batchmean"),
        real(ROWS, WIDTH).softmax(-1),
    ),
    "smoothed labels": (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([1, 0, 5, 2])),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([1, 0, 5, 2])),
    "weighted labels": (
        nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1), reduction="sum"),
        torch.tensor([1, 0, 5, 2]),
    ),
    "labels as probabilities": (nn.CrossEntropyLoss(), real(ROWS, WIDTH).softmax(-1)),
    "poisson": (nn.PoissonNLLLoss(), real(ROWS, WIDTH).abs()),
    "gaussian": (
        lambda y, t: functional.gaussian_nll_loss(y, t, torch.ones(ROWS, WIDTH)),
        real(ROWS, WIDTH),
    ),
}
SEVERAL = {
    "triplet margin": (functional.triplet_margin_loss, 3, ()),
    "triplet margin, swap": (nn.TripletMarginLoss(margin=2, p=1, swap=True), 3, ()),
    "triplet margin, another distance": (
        nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance(p=3)), 3, ()
    ),
    "cosine embedding": (
        nn.CosineEmbeddingLoss(margin=0.2), 2, (torch.tensor([1, -1, 1, -1]),)
    ),
    "contrastive": (
        lambda x, y, same: (
            same * functional.pairwise_distance(x, y).square()
            + (1 - same) * functional.relu(2 - functional.pairwise_distance(x, y)).square()
        ).mean(),
        2, (torch.tensor([1.0, 0.0, 1.0, 0.0]),),
    ),
    "hardest of a batch": (
        lambda x, same: functional.relu(
            (torch.cdist(x, x) * same).amax(1) - (torch.cdist(x, x) + 99 * same).amin(1) + 1
        ).mean(),
        1, (torch.eye(2).repeat_interleave(2, 0).repeat_interleave(2, 1),),
    ),
    "margin ranking": (nn.MarginRankingLoss(0.1), 2, (torch.ones(ROWS, WIDTH),)),
    "logits of pairs": (
        lambda x, y: functional.cross_entropy(
            functional.normalize(x) @ functional.normalize(y).t() / 0.1, torch.arange(ROWS)
        ),
        2, (),
    ),
    "distilled": (
        lambda x, y: functional.kl_div(
            (x / 2).log_softmax(1), (y / 2).log_softmax(1), reduction="batchmean", log_target=True
        ),
        1, (real(ROWS, WIDTH, seed=7),),
    ),
}  # fmt: skip
"""Losses of several inputs: how many go through the network, and what more they take."""


def check(model, loss, *inputs, tolerance=1e-12):
    """Hold loss and gradients of a step to PyTorch's, both in double from the same numbers."""
    step = lower(model, loss, inputs)
    memory = execute_steps(step, *inputs)
    given = [t.double() if t.is_floating_point() else t for t in inputs]
    targets = [] if loss is None else [given.pop()]
    expected = model.double()(*given)
    if loss is not None:
        expected = _twice_as_wide(loss)(expected, *targets)
    expected.backward()
    found = torch.from_numpy(memory[step.loss.buffer])[step.loss.offset]
    torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)
    gradients = {value.name: value for value in step.gradients}
    for name, parameter in model.named_parameters():
        (piece,) = gradients[name].pieces
        array = torch.from_numpy(memory[piece.buffer])
        strides = gradients[name].strides or torch.empty(parameter.shape).stride()
        own = array.as_strided(parameter.shape, strides, piece.offset)
        largest = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(
            own, parameter.grad, rtol=tolerance, atol=tolerance * largest, msg=name
        )


def _twice_as_wide(loss):
    return loss.double() if isinstance(loss, nn.Module) else loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mark_seeds_except(
        [*ACTIVATIONS, *OPERATORS, *FUNCTIONS], {"stacked", "indexed", "turned", "products"}
    ),
)
def test_functions(name):
    """A function between two layers, and its gradient."""
    torch.manual_seed(0)
    model = between(copy.deepcopy((ACTIVATIONS | OPERATORS | FUNCTIONS)[name]))
    check(model, functional.mse_loss, real(ROWS, WIDTH, seed=2), real(ROWS, WIDTH, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mark_seeds_except(LOSSES, {"smooth l1", "logits", "ignored labels", "gaussian"})
)
def test_losses(name):
    """A loss of a network, and its gradient."""
    torch.manual_seed(0)
    loss, target = LOSSES[name]
    check(between(torch.tanh), loss, real(ROWS, WIDTH, seed=2), target)


@pytest.mark.parametrize(
    "name", mark_seeds_except(list(SEVERAL), ["triplet margin", "hardest of a batch"])
)
def test_losses_of_several_inputs(name):
    """A loss that compares a network's results for several inputs, and its gradient."""
    torch.manual_seed(0)
    loss, through, more = SEVERAL[name]
    inputs = [real(ROWS, WIDTH, seed=2 + k) for k in range(through)]

    def compared(parts, *given):
        return loss(*map(parts[0], given[:through]), *given[through:])

    check(FunctionModule(compared, between(torch.tanh)), None, *inputs, *more)


def test_attention():
    """Attention with a mask."""
    torch.manual_seed(0)
    check(attention(), functional.mse_loss, real(2, 5, WIDTH), real(2, 5, WIDTH, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("batch", mark_seeds_except([1, 2], [2]))
def test_words(batch):
    """Embeddings, a block of BERT, and padding that is ignored."""
    torch.manual_seed(0)
    given = torch.tensor([[4, 9, 4, 0, 0], [1, 2, 3, 10, 0]][:batch])
    check(words(), functional.cross_entropy, given, torch.tensor([2, 0][:batch]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_words(mode):
    """Bags of words, one of them without any."""
    torch.manual_seed(0)
    given = (torch.tensor([4, 9, 4, 0, 1, 2, 10]), torch.tensor([0, 3, 3]), torch.tensor([2, 0, 1]))
    layers = (nn.EmbeddingBag(11, WIDTH, mode=mode), nn.Linear(WIDTH, 3))
    model = FunctionModule(lambda parts, *bags: parts[1](parts[0](*bags).tanh()), *layers)
    check(model, functional.cross_entropy, *given)


def test_norms_take_over_the_memory_of_what_they_read():
    """Batch norm and its gradient may work in place, although they make more than one tensor."""
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    inputs = (torch.randn(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))
    step = lower(nn.Sequential(*layers), functional.cross_entropy, inputs)
    norms = [node for node in step.graph.nodes if "batch_norm" in node.op]
    assert len(norms) == 2
    for node in norms:
        ((made, taken),) = node.in_place
        sizes = {buffer: step.buffers[buffer].bytes for buffer in (made, taken)}
        assert sizes == {made: 32, taken: 32}
        assert taken in node.inputs


def test_values_that_are_read_cannot_be_exported():
    """Exported C has no guards, so steps that depend on values of inputs are refused."""

    class Branching(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * 2 if (x > 0).all() else y

    def checked(y, t):
        return (
            -torch.distributions.Normal(y, torch.ones(1, 2), validate_args=True).log_prob(t).sum()
        )

    inputs = (torch.ones(1, 3), torch.zeros(1, 2))
    with pytest.raises(CaptureError, match=r"cannot be exported; .* \(validate_args=False"):
        lower(nn.Linear(3, 2), checked, inputs)
    with pytest.raises(CaptureError, match=r"value that is read at .* \(True\) would be part of"):
        lower(Branching(3, 2), functional.mse_loss, inputs)


KINDS = {
    "int64 as float32": lambda x: x.long().view(torch.float32),
    "float32 as int32": lambda x: x.view(torch.int32),
    "int64 as int32": lambda x: x.long().view(torch.int32),
}


@pytest.mark.parametrize("name", KINDS)
def test_elements_cannot_be_read_as_another_type(name):
    """An array in C has one type, and an int64 has 32 bits there."""
    model = FunctionModule(
        lambda own, x: own.layer(x) + KINDS[name](x).sum(), layer=nn.Linear(4, 4)
    )
    inputs = (torch.ones(2, 4), torch.zeros(2, 4))
    with pytest.raises(CaptureError, match=r"is read as 2 types.*; leave view\(dtype\) out"):
        lower(model, functional.mse_loss, inputs)


def test_parts_without_elements_are_filled():
    """A part without columns has no effect in a concatenation."""
    torch.manual_seed(0)
    model = between(lambda x: torch.cat([x.new_zeros(len(x), 0), x], 1))
    check(model, functional.mse_loss, real(ROWS, WIDTH, seed=2), real(ROWS, WIDTH, seed=3))


def test_truth_values_can_be_read_as_bytes():
    """Both have the same type in C."""
    model = FunctionModule(
        lambda own, x: own.layer(x * (x > 0).view(torch.uint8)), layer=nn.Linear(4, 4)
    )
    step = lower(model, functional.mse_loss, (torch.ones(2, 4), torch.zeros(2, 4)))
    assert {buffer.type.name for buffer in step.buffers.values()} == {"REAL", "UINT8"}
