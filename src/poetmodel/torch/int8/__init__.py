"""Int8 fronts and networks: their operators, their modules, and the conversion of modules.

Activations are int8 in the order batch, rows, columns, channels. In the forward pass, sums of
products and of windows are exact in int32. Operations after a sum, and additions of two tensors,
are float32, each rounded by itself, and the last rounding is half to even. The operators of the
forward pass are the definition, which the C kernels match byte for byte. Float PyTorch, and
PyTorch's reference of a quantized network, only approximate the results. Gradients are float32: see
`poetmodel.torch.int8.gradients`.
"""

from poetmodel.torch.int8 import patterns, pools, products, sums  # they register their operators

__all__ = ["patterns", "pools", "products", "sums"]
