"""Shapes, sizes and views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from poetmodel.errors import InputError
from poetmodel.graph.zoo.declaration import Value, Weight, require_counts, window_grid

if TYPE_CHECKING:
    from kit.messages import Told


@pytest.fixture
def image() -> Value:
    """Return two images of 3 channels, 5 x 7, in half precision."""
    return Value(name="image", shape=(2, 3, 5, 7), item_bytes=2)


def test_value_bytes_are_elements_times_item(image: Value) -> None:
    """A value of 2*3*5*7 = 210 elements of 2 bytes has 420."""
    assert (image.size, image.bytes) == (210, 420)


def test_flatten_is_the_same_tensor(image: Value) -> None:
    """Flattening changes the shape and neither name nor size: no copy."""
    flat = image.flatten()
    assert flat.shape == (2, 105)
    assert (flat.name, flat.bytes) == ("image", 420)


def test_view_of_another_size_is_refused(image: Value, told: Told) -> None:
    """A view cannot have more elements than its tensor; the error names it."""
    with told.raises(InputError):
        image.view(2, 3, 36)


def test_made_takes_the_element_type_unless_told(image: Value) -> None:
    """A result has its operand's element size; statistics and masks state their own."""
    assert image.made("y", 4).bytes == 8
    assert image.made("mask", 4, item_bytes=1).bytes == 4


def test_weight_size() -> None:
    """A weight of 4 x 3 in single precision has 12 elements, 48 bytes."""
    weight = Weight(name="w", shape=(4, 3), item_bytes=4)
    assert (weight.size, weight.bytes) == (12, 48)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "3", 10**6 + 1, None, float("nan")])
def test_counts_that_are_none_are_refused(bad: object, told: Told) -> None:
    """Whatever is no whole number from 1 to a million is named with its value."""
    with told.raises(InputError):
        require_counts(image_size=bad)


def test_counts_report_all_faults_at_once() -> None:
    """Two bad options come in one error; good ones are not mentioned."""
    with pytest.raises(InputError) as caught:
        require_counts(classes=0, image_size=5, batch_size=-2)
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["classes", "batch_size"]


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "grid"),
    # (side + 2 padding - kernel) // stride + 1 for sides 5 and 7
    [(3, 1, 1, (5, 7)), (3, 2, 1, (3, 4)), (2, 2, 0, (2, 3)), (5, 1, 0, (1, 3))],
)
def test_window_grid(
    image: Value, kernel: int, stride: int, padding: int, grid: tuple[int, int]
) -> None:
    """Windows are counted with padding, and a last incomplete step is dropped."""
    assert window_grid("w", image, kernel=kernel, stride=stride, padding=padding) == grid


def test_window_too_large_is_refused(image: Value, told: Told) -> None:
    """A window larger than the padded image names the operator, the sizes and the way out."""
    with told.raises(InputError):
        window_grid("pool", image, kernel=8, stride=1, padding=1)
