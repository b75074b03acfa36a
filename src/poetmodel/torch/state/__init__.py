"""State between steps: page files, state files, homes of state, and recovery after a crash."""
