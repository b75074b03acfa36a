"""Programs of ExecuTorch: a training step in an order and at addresses that keep a budget.

What ExecuTorch does not promise to keep is used in `edge` and `lowering` alone.
"""
