"""`python -m vit_jax.benchmark`: measures parts of the framework."""
