"""VTAB (arXiv 1910.04867): the 19 tasks checked, prepared and run, and a table of the results."""
