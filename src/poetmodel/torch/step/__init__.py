"""The training step as operations and tensors, optimizer updates, and the graph to be solved."""
