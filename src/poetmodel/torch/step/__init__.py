"""The step to be scheduled: units and tensors, updates, the graph that the solver decides on."""
