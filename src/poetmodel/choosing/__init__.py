"""Selection of the layers of a network to train on a device: a search that proves optimality."""
