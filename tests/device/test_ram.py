"""RAM of a device: hints for networks that exceed it."""

import pytest

from poetmodel.device import Device
from poetmodel.device.ram import find_whole_step
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import Variant


def test_state_in_the_graph_is_offered_where_it_fits():
    """SGD in place is offered for a built-in network, not for one whose graph has state already."""
    device = Device.load("rpi4b")
    found = find_whole_step("mlp", Variant(batch=2), device, paging=True)
    assert (found.state, found.in_place) == ("sgd", True)
    assert 0 < found.min_bytes <= device.ram_bytes
    assert find_whole_step("mlp", Variant(state="sgd"), device, paging=True) is None
    assert find_whole_step("paper/vgg16", Variant(), device, paging=True) is None


def test_wrong_option_is_an_error():
    """The wrong option is reported; it is not ignored."""
    with pytest.raises(InputError, match="tile"):
        find_whole_step("mlp", Variant(tile="much"), Device.load("rpi4b"), paging=True)
