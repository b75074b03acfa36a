"""Running: a program as Python, its costs, and whether it computes what eager PyTorch does."""
