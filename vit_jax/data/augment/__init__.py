"""Augments batches on the device, between to_device.py and the model. batch.py calls the rest:
flip, RandAugment or 3-Augment, normalisation, random erasing, label smoothing, mixup or CutMix.
"""
