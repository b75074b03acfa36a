"""Capturing: forward pass, loss and gradients as one graph, and its guards."""
