"""The rows of a benchmark's report."""

import statistics


def row(name: str, unit: str, runs: list[float]) -> dict:
    """One figure, measured several times."""
    return dict(name=name, unit=unit, median=statistics.median(runs), runs=list(runs))
