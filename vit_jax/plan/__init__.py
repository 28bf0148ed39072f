"""`python -m vit_jax.plan`: compiles the training step for a pod that is not at hand, and says what
it would take.
"""
