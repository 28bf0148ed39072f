"""From records on disk to batches on devices. Only this folder imports TensorFlow.

The path of an image, file by file:
  sources/      opens a data set; from an index to an encoded record
  order.py      which examples a step reads, and the random seed of each
  images.py     decodes, crops and resizes one image, with the operations of image_ops.py
  pipeline.py   batches of uint8 images on the host
  to_device.py  the same as global arrays on the mesh
  augment/      on the device: flip, RandAugment, mixup, ...
"""

from vit_jax.cli import quiet

quiet.begin()
