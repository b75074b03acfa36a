"""Steps of small networks, lowered and executed in double, against PyTorch's autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from kit.kernel_calls import executed  # noqa: E402
from kit.rotation import quick  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch
ROWS, WIDTH = 4, 6


def real(*shape: int, seed: int = 0) -> Any:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.function = function
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Apply all three."""
        return self.second(self.function(self.first(x)))


class Attention(nn.Module):
    """Attention written by hand, with a mask of what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 3 * WIDTH)
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Attend with two heads."""
        length = x.shape[1]
        parts = self.inside(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(later, float("-inf"))
        return self.outside((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Words(nn.Module):
    """Embeddings of words and places, and a block of BERT that sees no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.places = nn.Embedding(5, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        """Classify by the first word."""
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.block(y, src_key_padding_mask=x == 0)[:, 0])


class Patches(nn.Module):
    """A vision transformer of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 8, 4, 4)
        self.first = nn.Parameter(real(1, 1, 8))
        self.places = nn.Parameter(real(1, 5, 8))
        self.block = nn.TransformerEncoderLayer(
            8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        """Classify by the token in front."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.first.expand(len(x), -1, -1), y], dim=1) + self.places
        return self.head(self.block(y)[:, 0])


ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "relu6": nn.ReLU6,
    "leaky relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(0),
    "log sigmoid": nn.LogSigmoid,
    "prelu": nn.PReLU,
    "softsign": nn.Softsign,
    "threshold": lambda: nn.Threshold(0.1, 0.2),
    "rms norm": lambda: nn.RMSNorm(WIDTH, eps=2**-16),  # PyTorch rounds it to float
    "layer norm": lambda: nn.LayerNorm(WIDTH),
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda x: x.clamp(-0.3, 0.3),
    "square": lambda x: x**2,
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
    "windows": lambda x: x.unfold(1, 2, 1).reshape(ROWS, -1)[:, :WIDTH],
    "turned": lambda x: (x.t().contiguous() * x.t()).t() + x.t().exp().t(),
    "products": lambda x: torch.einsum("bi,bj->bj", x, x) + (x @ x.t()) @ x,
}
LOSSES: dict[str, tuple[Callable[..., Any], Any]] = {
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
SEVERAL: dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]] = {
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


class Compared(nn.Module):
    """A loss of what one network makes of several inputs."""

    def __init__(self, loss: Callable[..., Any], through: int) -> None:
        super().__init__()
        self.network, self.loss, self.through = Between(torch.tanh), loss, through

    def forward(self, *inputs: Any) -> Any:
        """Return the loss."""
        made = map(self.network, inputs[: self.through])
        return self.loss(*made, *inputs[self.through :])


def check(
    model: Any, loss: Callable[..., Any] | None, *inputs: Any, tolerance: float = 1e-12
) -> None:
    """Hold loss and gradients of a step to PyTorch's, both in double from the same numbers."""
    step = lower(model, loss, inputs)
    memory = executed(step, *inputs)
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


def _twice_as_wide(loss: Callable[..., Any]) -> Callable[..., Any]:
    return loss.double() if isinstance(loss, nn.Module) else loss


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ACTIVATIONS, *FUNCTIONS])
def test_functions(name: str) -> None:
    """A function between two layers, and its gradient."""
    torch.manual_seed(0)
    model = Between(ACTIVATIONS[name]() if name in ACTIVATIONS else FUNCTIONS[name])
    check(model, functional.mse_loss, real(ROWS, WIDTH, seed=2), real(ROWS, WIDTH, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """A loss of a network, and its gradient."""
    torch.manual_seed(0)
    loss, target = LOSSES[name]
    check(Between(torch.tanh), loss, real(ROWS, WIDTH, seed=2), target)


@pytest.mark.parametrize("name", quick(list(SEVERAL), ["triplet margin", "hardest of a batch"]))
def test_losses_of_several_inputs(name: str) -> None:
    """A loss that compares what one network makes of several inputs, and its gradient."""
    torch.manual_seed(0)
    loss, through, more = SEVERAL[name]
    inputs = [real(ROWS, WIDTH, seed=2 + k) for k in range(through)]
    check(Compared(loss, through), None, *inputs, *more)


def test_attention() -> None:
    """Attention with a mask."""
    torch.manual_seed(0)
    check(Attention(), functional.mse_loss, real(2, 5, WIDTH), real(2, 5, WIDTH, seed=1))


TRAINED: dict[str, tuple[Callable[[Any], Any], float | None]] = {
    "dampened": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3), None),
    "clipped": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 0.3),
    "clipped, adam": (lambda p: torch.optim.Adam(p, 0.1, amsgrad=True), 0.3),
    "groups": (
        lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.02}, {"params": p[1:]}], 0.1),
        None,
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    """Three steps of an optimizer: momentum that begins with a gradient, norms, groups."""
    torch.manual_seed(0)
    optimizer, most = TRAINED[name]
    model, inputs = nn.Linear(3, 2), (real(4, 3), real(4, 2))
    given = optimizer(list(model.parameters()))
    step = lower(model, functional.mse_loss, inputs, optimizer=given, clip_grad_norm=most)
    memory = executed(step, *inputs, steps=3)
    wide, (x, y) = model.double(), (t.double() for t in inputs)
    eager = optimizer(list(wide.parameters()))
    for _ in range(3):
        eager.zero_grad()
        functional.mse_loss(wide(x), y).backward()
        if most is not None:
            nn.utils.clip_grad_norm_(wide.parameters(), most)
        eager.step()
    for key, parameter in wide.named_parameters():
        found = torch.from_numpy(memory[key]).view(parameter.shape)
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_words(batch: int) -> None:
    """Embeddings, a block of BERT, and padding that takes no part."""
    torch.manual_seed(0)
    words = torch.tensor([[4, 9, 4, 0, 0], [1, 2, 3, 10, 0]][:batch])
    check(Words(), functional.cross_entropy, words, torch.tensor([2, 0][:batch]))


class Bags(nn.Module):
    """Bags of words, each begins at an offset."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(11, WIDTH, mode=mode), nn.Linear(WIDTH, 3)

    def forward(self, words: Any, offsets: Any) -> Any:
        """Return a score for each class of each bag."""
        return self.last(self.bags(words, offsets).tanh())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_words(mode: str) -> None:
    """Bags of words, one of them without any."""
    torch.manual_seed(0)
    words, offsets = torch.tensor([4, 9, 4, 0, 1, 2, 10]), torch.tensor([0, 3, 3])
    check(Bags(mode), functional.cross_entropy, words, offsets, torch.tensor([2, 0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_patches(batch: int) -> None:
    """A vision transformer; with one image many of its tensors are permuted."""
    torch.manual_seed(0)
    check(Patches(), functional.cross_entropy, real(batch, 2, 8, 8), torch.tensor([2, 0][:batch]))


def test_norms_take_over_the_memory_of_what_they_read() -> None:
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


def test_values_that_are_read_cannot_be_exported() -> None:
    """A program in C has no guards: it would do what the first inputs asked for."""

    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if (x > 0).all() else y

    def checked(y: Any, t: Any) -> Any:
        return -torch.distributions.Normal(y, torch.ones(1, 2)).log_prob(t).sum()

    inputs = (torch.ones(1, 3), torch.zeros(1, 2))
    with pytest.raises(CaptureError, match=r"cannot be exported; .* \(validate_args=False"):
        lower(nn.Linear(3, 2), checked, inputs)
    with pytest.raises(CaptureError, match=r"value that is read at .* \(True\) would be part of"):
        lower(Branching(3, 2), functional.mse_loss, inputs)
