"""From records on disk to batches on devices. Only this folder imports TensorFlow."""

import os

# TensorFlow reads and decodes here and computes nothing: without its messages and its numerics for neural networks.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
