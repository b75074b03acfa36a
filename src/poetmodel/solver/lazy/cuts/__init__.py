"""The families of cuts, one a module."""
