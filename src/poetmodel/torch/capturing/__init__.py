"""Capturing: forward pass, loss and gradients as one graph, and what it holds for."""
