"""Shared code of the tests: problems, graphs, steps, processes, pages."""
