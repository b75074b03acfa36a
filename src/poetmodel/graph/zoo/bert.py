"""BERT-base, and a BERT of any size; both functions also accept the keys of `TapeOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from poetmodel.errors import InputError
from poetmodel.graph.zoo.declaration import Value, require_counts
from poetmodel.graph.zoo.operators import (
    add,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    matmul,
    scale,
    select,
    softmax,
)
from poetmodel.graph.zoo.tape import Tape, TapeOptions

if TYPE_CHECKING:
    from typing import Unpack

    from poetmodel.graph.structure import Graph

_OUTPUT_HEADS: Final = ("classification", "mlm")
"""Last layers of BERT: of a classifier, or of a masked language model (MLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes and dropout rate of an encoder; the default sizes are those of BERT-base."""

    blocks: int = 12
    hidden: int = 768
    """Features of a token."""
    heads: int = 12
    """Attention heads, which divide the features."""
    feedforward: int = 3072
    """Inner features of the feed-forward."""
    vocabulary: int = 30522
    positions: int = 512
    """Maximum tokens per sample."""
    dropout: float = 0.0
    """Dropout rate."""


def bert_base(
    *,
    seq_len: int = 128,
    classes: int = 2,
    head: Literal["classification", "mlm"] = "classification",
    dropout: float = 0.0,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return BERT-base, uncased: 12 blocks of 768 features, 12 heads, 3072 in the feed-forward.

    Embeddings, encoder and pooler have 109,482,240 parameters. The classification head adds
    ``769 * classes``. The MLM head has no pooler, but a transform and a decoder whose weight is the
    word embedding: 109,514,298 parameters in all. `classes` has no effect on it, but is validated.

    Every token attends to all tokens, so there is no attention mask. Dropout is in embeddings,
    attention, both residual branches and the classification head. Raises `InputError` for more than
    512 tokens per sample, for an unknown `head`, and for any other invalid size, rate or option.

    J. Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
    understanding", NAACL 2019, doi:10.18653/v1/N19-1423.
    """
    if head not in _OUTPUT_HEADS:
        raise InputError(f"head: expected one of {', '.join(_OUTPUT_HEADS)}, got {head!r}")
    tape = Tape("bert-base", **options)
    sizes = _Sizes(dropout=dropout)
    require_counts(seq_len=seq_len, classes=classes)
    x = _record_encoder(tape, seq_len, sizes)
    if head == "mlm":
        return _predict_tokens(tape, x, sizes)
    return _pool_and_classify(tape, x, classes, sizes)


def transformer(
    *,
    seq_len: int = 128,
    classes: int = 2,
    blocks: int = 1,
    hidden: int = 768,
    heads: int = 12,
    feedforward: int = 3072,
    vocabulary: int = 30522,
    dropout: float = 0.0,
    **options: Unpack[TapeOptions],
) -> Graph:
    """Return a BERT of one block, or of any size: embeddings, blocks, pooler, classification head.

    `seq_len` is also the number of positions that have an embedding. A block has `hidden` features,
    divided among its `heads`, and `feedforward` inner features. Raises `InputError` if `heads` does
    not divide `hidden`, and for any other invalid size, rate or option.
    """
    counts = {
        "blocks": blocks,
        "hidden": hidden,
        "heads": heads,
        "feedforward": feedforward,
        "vocabulary": vocabulary,
    }
    require_counts(seq_len=seq_len, classes=classes, **counts)
    sizes = _Sizes(**counts, positions=seq_len, dropout=dropout)
    tape = Tape("transformer", **options)
    return _pool_and_classify(tape, _record_encoder(tape, seq_len, sizes), classes, sizes)


def _record_encoder(tape: Tape, seq_len: int, sizes: _Sizes) -> Value:
    """Record embeddings and encoder blocks; return the last block's output."""
    if seq_len > sizes.positions:
        raise InputError(f"seq_len: expected at most {sizes.positions}, got {seq_len}")
    if sizes.hidden % sizes.heads:
        raise InputError(f"heads: expected a divisor of hidden ({sizes.hidden}), got {sizes.heads}")
    tables = (
        ("token", (tape.batch_size, seq_len), sizes.vocabulary),
        ("position", (seq_len,), sizes.positions),
        ("token_type", (tape.batch_size, seq_len), 2),
    )
    embeddings = []
    for kind, shape, rows in tables:
        ids, name = tape.add_indices(f"{kind}_ids", *shape), f"embeddings.{kind}"
        declaration = embedding(
            name, ids, rows=rows, features=sizes.hidden, item_bytes=tape.item_bytes
        )
        embeddings.append(tape.record(declaration))
    x = tape.record(add("embeddings.add", *embeddings))
    x = tape.record(layer_norm("embeddings.norm", x))
    x = tape.record_dropout("embeddings.dropout", x, rate=sizes.dropout)
    for number in range(sizes.blocks):
        x = _record_block(tape, f"block{number}", x, sizes)
    return x


def _record_block(tape: Tape, name: str, x: Value, sizes: _Sizes) -> Value:
    """Record attention and feed-forward, each with a residual connection and a layer norm."""
    y = _record_attention(tape, f"{name}.attention", x, sizes)
    x = _record_residual(tape, f"{name}.attention", x, y, sizes)
    y = tape.record(linear(f"{name}.ffn.linear1", x, features=sizes.feedforward))
    y = tape.activate(f"{name}.ffn.gelu", y, "gelu")
    y = tape.record(linear(f"{name}.ffn.linear2", y, features=sizes.hidden))
    return _record_residual(tape, f"{name}.ffn", x, y, sizes)


def _record_attention(tape: Tape, name: str, x: Value, sizes: _Sizes) -> Value:
    """Record multi-head self-attention with its output layer; heads are split by views."""
    batch, length, hidden = x.shape
    query, key, value = (
        tape.record(linear(f"{name}.{role}", x, features=hidden)).view(
            batch, sizes.heads, length, hidden // sizes.heads
        )
        for role in ("query", "key", "value")
    )
    scores = tape.record(matmul(f"{name}.scores", query, key, transpose_right=True))
    scores = tape.record(scale(f"{name}.scale", scores))
    weights = tape.record(softmax(f"{name}.softmax", scores))
    weights = tape.record_dropout(f"{name}.softmax.dropout", weights, rate=sizes.dropout)
    context = tape.record(matmul(f"{name}.context", weights, value)).view(batch, length, hidden)
    return tape.record(linear(f"{name}.output", context, features=hidden))


def _record_residual(tape: Tape, name: str, x: Value, y: Value, sizes: _Sizes) -> Value:
    """Record dropout of `y`, its sum with `x`, and a layer norm of the sum."""
    y = tape.record_dropout(f"{name}.dropout", y, rate=sizes.dropout)
    return tape.record(layer_norm(f"{name}.norm", tape.record(add(f"{name}.add", y, x))))


def _pool_and_classify(tape: Tape, x: Value, classes: int, sizes: _Sizes) -> Graph:
    """Record a pooler of each sample's first token, a classifier and the loss."""
    first_tokens = tape.record(select("pooler.select", x))
    pooled = tape.record(linear("pooler.linear", first_tokens, features=sizes.hidden))
    pooled = tape.activate("pooler.tanh", pooled, "tanh")
    pooled = tape.record_dropout("classifier.dropout", pooled, rate=sizes.dropout)
    return tape.classify("classifier", pooled, classes=classes)


def _predict_tokens(tape: Tape, x: Value, sizes: _Sizes) -> Graph:
    """Record the MLM head, decoded by the word embedding, and the loss; return the graph."""
    x = tape.record(linear("mlm.transform", x, features=sizes.hidden))
    x = tape.activate("mlm.gelu", x, "gelu")
    x = tape.record(layer_norm("mlm.norm", x))
    logits = tape.record(
        linear("mlm.decoder", x, features=sizes.vocabulary, tied_to="embeddings.token.weight")
    )
    labels = tape.add_indices("labels", *logits.shape[:-1])
    return tape.differentiate(cross_entropy("loss", logits, labels))
