"""State between steps: page files, state files, where state is, what a killed process left."""
