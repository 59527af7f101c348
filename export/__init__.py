"""Turn checkpoints into a bundle of quantized ONNX graphs."""
