"""Budgets, reserves, cached solves and messages of all plans of PyTorch."""
