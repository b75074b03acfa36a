"""A back end for ``torch.compile``: the joint graph of AOTAutograd, planned within a RAM budget.

One storage that the graph makes is one tensor of the plan; views are made again from it. The plan
becomes a joint graph in its own order, in which a recomputation is a copy of a node and a page is
an operator, and PyTorch splits it into the forward and the backward pass.
"""
