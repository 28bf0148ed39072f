"""VTAB-1k (arXiv 1910.04867): checks, prepares and runs the 19 tasks, and reports the results."""
