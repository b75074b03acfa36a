"""FX graphs: their tensors, operators and kernels, whatever captured them."""

from poetmodel.torch.graph import dropout  # its kernels are registered  # noqa: F401
