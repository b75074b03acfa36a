"""Capturing: forward pass, loss and gradients as one graph, and the guards under which it holds."""
