"""Curves of runs, drawn from their metrics.jsonl."""

from collections.abc import Mapping

from etils import epath
from matplotlib.figure import Figure

from vit_jax.metrics import read_lines


def series(workdir: epath.Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of a run."""
    points = [(line["step"], line[name]) for line in read_lines(workdir / "metrics.jsonl") if name in line]
    return [step for step, _ in points], [value for _, value in points]


def curves(runs: Mapping[str, epath.Path], metric: str, label: str, path: epath.Path) -> None:
    """Draws `metric` of every run, side by side with a common vertical axis, as a PNG.

    Args:
      runs: title -> workdir.
      metric: key of metrics.jsonl.
      label: of the vertical axis.
      path: of the PNG.
    """
    figure = Figure(figsize=(4.5 * len(runs), 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (title, workdir) in zip(panels, runs.items(), strict=True):
        steps, values = series(workdir, metric)
        panel.plot(steps, values, marker="o" if len(steps) < 20 else None, markersize=4)
        panel.set(title=title, xlabel="step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
