"""A frozen front in int8: its operators, modules of them, and who makes such modules.

Activations are int8 in the order batch, rows, columns, channels. Every sum is exact in int32. What
follows it is float32, each operation rounded for itself, and the last rounding is half to even.
That is the definition, which the kernels in C have byte for byte. Float PyTorch, and PyTorch's own
reference of a quantized network, are approximations of it, and it of them.
"""
