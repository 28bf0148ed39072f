"""`vit_jax finetune FOLDER`: what to train on images of one's own, by the data, the weights and the
device.
"""
