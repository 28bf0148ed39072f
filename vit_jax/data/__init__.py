"""From records on disk to batches on devices. Only this folder imports TensorFlow.

The path of an image, file by file:
  sources/      opens a data set; from an index to an encoded record
  order.py      which examples a step reads, and the random seed of each
  images.py     decodes, crops and resizes one image, with the operations of image_ops.py
  pipeline.py   batches of uint8 images on the host
  to_device.py  the same as global arrays on the mesh
  augment/      on the device: flip, RandAugment, mixup, ...
"""

import os

# Without this, TensorFlow logs much more than errors. A line about oneDNN remains at its import,
# which cli/quiet.py holds back: TF_ENABLE_ONEDNN_OPTS=0 would remove it, but also oneDNN's
# allocator, without which the pipeline takes 7 % more core time.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
