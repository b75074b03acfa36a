"""Devices and costs: hardware of a board, and time and energy of its computations and transfers."""

from poetmodel.device.cost import FREE, Cost, PageCost
from poetmodel.device.costs import Costs, CostTable
from poetmodel.device.hardware import Compute, Device, Flash, Storage, StorageMode, Transfer

__all__ = [
    "FREE",
    "Compute",
    "Cost",
    "CostTable",
    "Costs",
    "Device",
    "Flash",
    "PageCost",
    "Storage",
    "StorageMode",
    "Transfer",
]
