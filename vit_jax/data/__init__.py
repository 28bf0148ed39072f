"""From records on disk to batches on devices. Only this folder imports TensorFlow."""

import os

# TensorFlow reads and decodes here and computes nothing: without its messages and its numerics for neural networks.
TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
TENSORFLOW = {name: value for name, value in TENSORFLOW.items() if name not in os.environ}
os.environ.update(TENSORFLOW)
