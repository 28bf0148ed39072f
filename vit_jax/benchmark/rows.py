"""A figure of a benchmark."""

import statistics


def row(name: str, unit: str, runs: list[float]) -> dict:
    """A figure of a benchmark."""
    return dict(name=name, unit=unit, median=statistics.median(runs), runs=list(runs))
