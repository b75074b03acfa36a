"""A training step as calls of kernels in C: its data, its file, and rewrites with equal results."""
