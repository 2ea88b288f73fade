"""ONNX models, run by onnxruntime."""
