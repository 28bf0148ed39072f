"""What is measured on a model. suite.py opens the data and runs the evaluations of a config; the
other modules receive batches and a compiled step, or features.
"""
