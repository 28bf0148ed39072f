"""How fast runs were, where their time went, and what they left on disk and out, as tables."""

from collections.abc import Sequence

import numpy as np

from vit_jax.report.run import Run
from vit_jax.report.tables import Table
from vit_jax.train import goodput
from vit_jax.train.console import duration

# Row -> (metric, form, unit) of the median over all lines.
SPEEDS = {
    "images per second": ("perf/images_per_sec", "{:,.1f}"),
    "images per second and device": ("perf/images_per_sec_per_chip", "{:,.1f}"),
    "step": ("perf/step_ms_p50", "{:,.1f} ms"),
    "slowest 5 % of the steps, from": ("perf/step_ms_p95", "{:,.1f} ms"),
    "wait for data": ("perf/data_wait", "{:.1%} of the time of the steps"),
    "model FLOPs utilisation": ("perf/mfu", "{:.1%}"),
    "compilation": ("perf/compile_s", "{:.1f} s"),
    "device memory, peak": ("perf/hbm_gib", "{:.2f} GiB"),
}
SHOWN = 5  # lines of a list


def speeds(runs: Sequence[Run]) -> Table:
    """Medians over the lines of metrics."""
    rows = []
    for name, (key, form) in SPEEDS.items():
        found = [run.series[key].finite if key in run.series else () for run in runs]
        cells = [form.format(np.median(values)) if len(values) else "" for values in found]
        rows.append([name, *cells])
    return Table.of_runs([run.label for run in runs], rows)


def times(runs: Sequence[Run]) -> Table:
    """Where the wall time went, over all starts; parts without time are left out."""
    totals = [goodput.totals(run.starts) if run.starts else None for run in runs]
    rows = [["goodput", *(f"{one['goodput']:.1%}" if one else "" for one in totals)]]
    rows.append(["wall time", *(duration(one["wall_s"]) if one else "" for one in totals)])
    rows.append(["starts", *(f"{one['starts']:,}" if one else "" for one in totals)])
    for part, name in goodput.PARTS.items():
        rows.append([name, *(part_text(one, part) for one in totals)])
    repeated = [one["steps_repeated"] if one else 0 for one in totals]
    rows.append(["number of steps done again", *(f"{n:,}" if n else "" for n in repeated)])
    return Table.of_runs([run.label for run in runs], rows)


def part_text(totals: dict | None, part: str) -> str:
    """Seconds and share of a part; "" for one that took no time."""
    seconds = totals["parts"][part] if totals else 0
    if not round(seconds):
        return ""
    return f"{duration(seconds)}, {seconds / totals['wall_s']:.1%}"


def files(runs: Sequence[Run]) -> Table:
    """Checkpoints, and what was skipped or left out."""
    rows = [
        ["checkpoints", *(checkpoints(run) for run in runs)],
        ["examples skipped", *(skipped(run) for run in runs)],
        ["batches left out after loss spikes", *(left_out(run) for run in runs)],
        ["not finite", *(nonfinite(run) for run in runs)],
    ]
    return Table.of_runs([run.label for run in runs], rows)


def checkpoints(run: Run) -> str:
    steps = [f"{step:,}" for step in run.checkpoints]
    if not steps:
        return ""
    if len(steps) > 2 * SHOWN:
        steps = [*steps[:SHOWN], f"... ({len(steps) - 2 * SHOWN:,} more)", *steps[-SHOWN:]]
    return f"{'step' if len(steps) == 1 else 'steps'} {'; '.join(steps)}"


def skipped(run: Run) -> str:
    if not run.skipped:
        return ""
    lines = [f"{entry.get('name')}: {entry.get('reason')}"[:300] for entry in run.skipped[:SHOWN]]
    first = f", the first {SHOWN}" if len(run.skipped) > SHOWN else ""
    return "\n".join([f"{len(run.skipped):,} in skipped.jsonl{first}:", *lines])


def left_out(run: Run) -> str:
    lines = [
        f"{part['batches'][0]} to {part['batches'][1]}, after the spike at step {part['spike']}; "
        f"back to step {part['step']}"
        for part in run.left_out[:SHOWN]
    ]
    lines += ["..."] if len(run.left_out) > SHOWN else []
    return "\n".join(lines)


def nonfinite(run: Run) -> str:
    if not run.nonfinite:
        return ""
    return f"the run ended with loss {str(run.nonfinite.get('loss'))[:40]}: see nonfinite.json"
