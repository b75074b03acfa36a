"""Primal heuristics: construct, repair and improve schedules without a proof."""
