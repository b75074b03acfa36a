"""Cases: a graph, a device, limits and options of a search, as a command line states them."""
