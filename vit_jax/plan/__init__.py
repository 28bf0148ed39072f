"""`python -m vit_jax.plan`: memory, time and cost of a config on a TPU pod, by the TPU compiler."""
