"""Starting vit_jax on one or many machines."""
