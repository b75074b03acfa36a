"""Tiles: a step divided into slices of channels, and the choice of the tile size."""
