"""FX graphs: tensors, operators, kernels, profiles and rewriting, for each kind of capture."""

from poetmodel.torch.graph import dropout  # its kernels are registered  # noqa: F401
