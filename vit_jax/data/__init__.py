"""From records on disk to batches on devices. Only this folder imports TensorFlow."""

import os

# TensorFlow says nothing but what is wrong, except for a line about oneDNN as it is imported. That
# line goes away with TF_ENABLE_ONEDNN_OPTS=0, and so does oneDNN's allocator, without which the
# pipeline takes 7 % more core time.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
