"""What is measured on a model. Evaluators receive batches and an apply function, and know no more."""
