"""Import ONNX files as trainable PyTorch modules: a registry with one function per operator."""
