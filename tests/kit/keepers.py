"""Functions of a model file that store a table in various objects, and return it."""

import functools

import torch


def make_table(size):
    """Return a table, a tensor of `size` numbers from 1 on."""
    return torch.arange(1.0, size + 1)


bounded = functools.lru_cache(maxsize=4)(make_table)
unbounded = functools.cache(make_table)
TABLES = {}
LISTED = []
NAME = None


class Holder:
    """A class whose attribute `table` is set on the class, or on an instance."""

    table = None


OBJECT = Holder()


def store_in_dictionary(size):
    """Store the table in a dictionary under its size."""
    if size not in TABLES:
        TABLES[size] = make_table(size)
    return TABLES[size]


def store_in_tuple(size):
    """Store a tuple of two tables in a dictionary, and return the second one."""
    if "both" not in TABLES:
        TABLES["both"] = (make_table(size), make_table(size) + 1)
    return TABLES["both"][1]


def store_in_list(size):
    """Store the table in a list."""
    if not LISTED:
        LISTED.append(make_table(size))
    return LISTED[0]


def store_in_name(size):
    """Store the table in a global variable."""
    global NAME  # noqa: PLW0603 - some models do this
    if NAME is None:
        NAME = make_table(size)
    return NAME


def store_in_object(size):
    """Store the table as an attribute of an object."""
    if OBJECT.table is None:
        OBJECT.table = make_table(size)
    return OBJECT.table


def store_in_class(size):
    """Store the table as an attribute of a class."""
    if Holder.table is None:
        Holder.table = make_table(size)
    return Holder.table
