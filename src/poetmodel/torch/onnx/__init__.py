"""ONNX files as modules that train: one small function for each operator, in a registry."""
