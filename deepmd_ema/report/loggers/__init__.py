"""Loggers of a run: TensorBoard, Weights & Biases and MLflow."""
