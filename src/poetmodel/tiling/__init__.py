"""Tiles: a step in slices of channels, and the choice of their size."""
