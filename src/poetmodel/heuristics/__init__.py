"""Primal heuristics: schedules without a proof."""
