"""A training step as calls of kernels in C: its data, file, and rewrites that keep every bit."""
