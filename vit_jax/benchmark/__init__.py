"""Measures parts of the framework."""
