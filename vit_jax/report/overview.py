"""What was run, and what came out, as tables with a column for each run."""

from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.report import settings
from vit_jax.report.run import Run, date
from vit_jax.report.series import Series
from vit_jax.report.tables import Table
from vit_jax.train.recipe import held_out

NOT_RESULTS = ("count", "l2")  # of an evaluation


def facts(runs: Sequence[Run]) -> Table:
    rows = [[name, *(text(run) for run in runs)] for name, text in FACTS.items()]
    if len(runs) > 1:  # long, and among the commands
        rows = [row for row in rows if row[0] != "command"]
    return Table.of_runs([run.label for run in runs], rows)


def model(run: Run) -> str:
    name = str(run.flat.get("model.variant") or "")
    count = run.size("parameters")
    return ", ".join(filter(None, [name, count and f"{count:,.0f} parameters"]))


def data(run: Run) -> str:
    count = run.size("num_examples")
    classes = run.size("num_classes")
    parts = [
        str(run.flat.get("data.name", "")),
        str(run.flat.get("data.split", "")),
        count and f"{count:,.0f} images",
        classes and f"{classes:,.0f} classes",
    ]
    return ", ".join(filter(None, parts))


def amount(run: Run) -> str:
    """How much the run has trained until now."""
    batch = run.size("batch_size")
    if not batch or not run.last_step:
        return ""
    images = batch * run.last_step
    text = f"{images:,.0f} images"
    if run.size("num_examples"):
        text += f", {images / run.size('num_examples'):,.1f} epochs"
    if run.size("train_flops_per_image"):
        text += f", {images * run.size('train_flops_per_image'):.3g} FLOPs"
    return text


def devices(run: Run) -> str:
    found = run.record.get("devices", {})
    if not found.get("kind"):
        return ""
    processes = found.get("processes", 1)
    several = f" in {processes} processes" if processes != 1 else ""
    return f"{found.get('count', '?')} x {found['kind']}{several}"


def dates(run: Run) -> str:
    if not run.starts:
        return ""
    starts = f" in {len(run.starts):,} starts" if len(run.starts) > 1 else ""
    return f"{date(run.begun)} to {date(run.seen)}{starts}"


def versions(run: Run) -> str:
    return ", ".join(
        f"{name} {version}" for name, version in run.record.get("versions", {}).items()
    )


def code(run: Run) -> str:
    commit = str(run.record.get("commit", ""))[:12]
    digest = run.record.get("code", "")
    return ", ".join(
        filter(None, [commit and f"commit {commit}", digest and f"digest of the files {digest}"])
    )


def from_config(key: str) -> Callable[[Run], str]:
    def read(run: Run) -> str:
        value = run.flat.get(key, "")
        return "" if value == "" else settings.show(value)

    return read


def command(run: Run) -> str:
    words = run.command
    if not run.record:
        return ""
    return settings.command_text(words) or settings.begun_from(words)


FACTS = {
    "state": lambda run: run.state,
    "workdir": lambda run: run.folder.path,
    "command": command,
    "dates": dates,
    "data": data,
    "model": model,
    "starts from": from_config("init_from"),
    "objective": from_config("objective"),
    "trained": amount,
    "seed": from_config("seed"),
    "devices": devices,
    "code": code,
    "versions": versions,
}


# --- evaluations during training ---


def results(runs: Sequence[Run]) -> Table:
    """The last value of every evaluation, and the best if it is another one."""
    keys = {key for run in runs for key in run.series if key.startswith("eval/")}
    keys = sorted(key for key in keys if key.rpartition("/")[2] not in NOT_RESULTS)
    rows = [[key.removeprefix("eval/"), *(result(run, key) for run in runs)] for key in keys]
    return Table.of_runs([run.label for run in runs], rows)


def result(run: Run, key: str) -> str:
    one = run.series.get(key)
    if one is None:
        return ""
    last = number(key, one.value[-1])
    text = f"{last}{interval(run, key)} at step {one.step[-1]:,}"
    i = best(one, key)
    if i is None or number(key, one.value[i]) == last:
        return text
    return f"{text}; best {number(key, one.value[i])} at step {one.step[i]:,}"


def best(one: Series, key: str) -> int | None:
    """The index of the lowest loss, or of the highest value of another metric, if one is finite."""
    if not len(one.finite):
        return None
    value = np.where(np.isfinite(one.value), one.value, np.nan)
    return int(np.nanargmin(value) if key.endswith("loss") else np.nanargmax(value))


def number(key: str, value: float) -> str:
    is_accuracy = key.endswith("/top1") and 0 <= value <= 1
    return f"{value:.2%}" if is_accuracy else f"{value:.4g}"


def interval(run: Run, key: str) -> str:
    """Of the last accuracy, if the number of images is known."""
    count = run.series.get(f"{key.rpartition('/')[0]}/count")
    share = run.series[key].value[-1]
    if count is None or not key.endswith("/top1") or not 0 <= share <= 1:
        return ""
    return interval_text(share, float(count.value[-1]))


def interval_text(share: float, count) -> str:
    """Such as " (95.3% to 98.7%, 360 images)"; "" if `count` is not that of images."""
    if not isinstance(count, int | float) or not 1 <= count < 1e15:
        return ""
    low, high = held_out.interval(share, int(count))
    return f" ({low:.1%} to {high:.1%}, {int(count):,} images)"
