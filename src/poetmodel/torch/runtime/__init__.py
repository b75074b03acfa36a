"""Execution: a plan as a Python program, measured costs, and comparison with eager PyTorch."""
