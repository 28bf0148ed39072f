"""Curves of runs, drawn from their metrics.jsonl."""

from collections.abc import Mapping

from etils import epath
from matplotlib.figure import Figure

from vit_jax.train.metrics import read_lines


def series(workdir: epath.Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of a run."""
    lines = [line for line in read_lines(workdir / "metrics.jsonl") if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def draw(runs: Mapping[str, epath.Path], lines: Mapping[str, str], path: epath.Path) -> None:
    """Draws metrics of every run as a PNG, one panel per run with a shared vertical axis.

    Args:
      runs: title -> workdir.
      lines: label -> key of metrics.jsonl; with several, the first is drawn as a thin line and the
        others with markers.
      path: of the PNG.
    """
    figure = Figure(figsize=(4.5 * len(runs), 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (title, workdir) in zip(panels, runs.items(), strict=True):
        for i, (label, name) in enumerate(lines.items()):
            is_thin = i == 0 and len(lines) > 1
            style = dict(linewidth=0.8) if is_thin else dict(linewidth=2.0, marker="o")
            panel.plot(*series(workdir, name), label=label, **style)
        panel.set(title=title, xlabel="step")
        panel.grid(alpha=0.3)
    panels[0].legend()
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
