"""A training step as calls of kernels in C: data, file, equal rewrites, instruction estimates."""
