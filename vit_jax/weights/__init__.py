"""Parameters from anywhere, and how they are fitted to a model."""
