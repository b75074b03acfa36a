"""The step to be scheduled: operations, tensors, updates, the graph that the solver decides on."""
