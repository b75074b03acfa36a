"""A training step as C: what is computed by which kernels, and the folder that builds."""
