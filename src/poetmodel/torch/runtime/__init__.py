"""Running: a plan as a Python program, its measured costs, and its comparison with eager."""
