"""FX graphs: tensors, operators, kernels, profiles and rewriting, for each kind of capture."""

from poetmodel.torch.graph import dropout  # registers its kernels  # noqa: F401
