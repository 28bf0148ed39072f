"""Training: its loop, its step, and what both are made of."""
