"""Int8 fronts and networks: their operators, their modules, and the conversion of modules.

Activations are int8 in the order batch, rows, columns, channels. Every sum is exact in int32. The
operations after a sum are float32, each rounded by itself, and the last rounding is half to even.
These operators are the definition, which the C kernels match byte for byte. Float PyTorch, and
PyTorch's reference of a quantized network, only approximate the results.
"""
