"""What the records of two runs say about why they differ: events between the last step that was the
same and the first that was not, then what differs from the start.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from vit_jax import config as configs
from vit_jax.compare.departure import Departure
from vit_jax.report import settings
from vit_jax.report.run import Run
from vit_jax.report.series import Series
from vit_jax.train import workdir

# Config keys that decide in which order numbers are added, so that runs differ by rounding.
ORDER_OF_SUMS = ("mesh.", "accum_steps", "model.remat", "model.scan", "model.attention")
# Relative differences that other orders of sums lead to in one step, by `model.dtype`.
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3}
COUNTS = {
    "train/skipped_steps": "left out an update by step {step}, which was not finite",
    "data/skipped": "skipped training images by step {step} (skipped.jsonl)",
}
SHOWN = 5  # keys of what changed at a start


def pairs(a: Mapping, b: Mapping) -> dict[str, list]:
    """Key -> [value in a, value in b] of the keys whose values differ; None for one that is not
    there.
    """
    keys = dict.fromkeys([*a, *b])
    found = {key: [a.get(key), b.get(key)] for key in keys}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


def config_differences(a: Run, b: Run) -> dict[str, list]:
    """The same of the configs; {} if one is not known."""
    if not (a.config and b.config):
        return {}
    return pairs(workdir.stated(a.flat, b.flat), workdir.stated(b.flat, a.flat))


def record_differences(a: Run, b: Run, part: str) -> dict[str, list]:
    """The same of `part` of config.json; {} if one run does not say it."""
    both = [run.record.get(part, {}) for run in (a, b)]
    return pairs(*both) if all(both) else {}


def of_the_recipe(a: Run, b: Run) -> list[str]:
    """What is different in the recipes or the data of two runs, besides the seed and what only
    rounds otherwise.
    """
    keys = [key for key in config_differences(a, b) if not configs.may_change(key)]
    keys = [key for key in keys if key != "seed" and not key.startswith(ORDER_OF_SUMS)]
    records = ("data_fingerprint", "teacher_fingerprint")
    return [*keys, *(part for part in records if one_difference(a, b, part))]


def one_difference(a: Run, b: Run, part: str) -> list | None:
    """[value in a, value in b] of an entry of config.json; None if they are the same, or one run
    does not say it.
    """
    pair = [run.record.get(part) for run in (a, b)]
    return pair if all(pair) and pair[0] != pair[1] else None


def sums_differently(a: Run, b: Run) -> list[str]:
    """Why the runs may differ by rounding: their devices, versions, or keys of the config."""
    keys = [key for key in config_differences(a, b) if key.startswith(ORDER_OF_SUMS)]
    versions = [name for name in record_differences(a, b, "versions") if name.startswith("jax")]
    return [*keys, *versions, *record_differences(a, b, "devices")]


def rounding(a: Run, b: Run) -> float:
    """The relative difference in one step that other orders of sums explain; 0 for runs that should
    have the same bits.
    """
    if not sums_differently(a, b):
        return 0.0
    return max(ROUNDING.get(run.flat.get("model.dtype"), 0.0) for run in (a, b))


# --- what happened on the way ---


def starts(run: Run) -> dict[str, int]:
    """What happened -> after which step: every start but the first."""
    found = {}
    for record in run.starts[1:]:
        step = int(record["first_step"])
        text = f"was started again after step {step}"
        changed = record.get("changed", {})
        if changed:
            texts = [f"{key} {before} -> {now}" for key, (before, now) in changed.items()]
            text += f" with {', '.join(texts[:SHOWN])}" + ", ..." * (len(texts) > SHOWN)
        found[text] = step
    return found


def counted(run: Run) -> dict[str, int]:
    """The steps at which a count of what was skipped grew."""
    found = {}
    for key, text in COUNTS.items():
        one = run.series.get(key)
        for step in growth(one) if one else ():
            found[text.format(step=step)] = step
    return found


def growth(one: Series) -> list[int]:
    """The steps at which a count is larger than before."""
    return one.step[np.diff(one.value, prepend=0.0) > 0].tolist()


def left_out(run: Run) -> dict[str, int]:
    """The ways back after loss spikes."""
    found = {}
    for part in run.left_out:
        first, last = part["batches"]
        text = f"went back to step {part['step']} and left out batches {first} to {last}"
        found[f"{text}, after a loss spike"] = part["step"]
    return found


def evaluated(run: Run) -> dict[str, int]:
    names = {key.split("/")[1]: one for key, one in run.series.items() if key.startswith("eval/")}
    return {
        f"evaluated {name} after step {step}": step
        for name, one in names.items()
        for step in one.step.tolist()
    }


# Those that happen after the metrics of a step are measured come too late for it.
EVENTS = ((starts, False), (counted, True), (left_out, False), (evaluated, False))


def events(a: Run, b: Run, found: Departure) -> list[str]:
    """What only one of the runs did since the last step that was the same."""
    begin = found.last_same or 0
    lines = []
    for kind, is_in_step in EVENTS:
        end = found.step + is_in_step
        both = [kind(run) for run in (a, b)]
        for run, own, other in ((a, both[0], both[1]), (b, both[1], both[0])):
            new = (text for text in own if text not in other)
            lines += [f"{run.label} {text}" for text in new if begin <= own[text] < end]
    return lines


# --- all of it ---


def from_the_start(a: Run, b: Run) -> list[str]:
    """What differs between the runs from the start, if it may change numbers."""
    lines = []
    for key, values in config_differences(a, b).items():
        if not configs.may_change(key) or key.startswith(ORDER_OF_SUMS):
            of_a, of_b = map(settings.show, values)
            lines.append(f"{key}: {of_a} in {a.label}, {of_b} in {b.label}")
    named = dict(data_fingerprint="training data", teacher_fingerprint="teacher", code="code")
    for part, name in named.items():
        pair = one_difference(a, b, part)
        if pair:
            lines.append(f"another {name}: {pair[0]} in {a.label}, {pair[1]} in {b.label}")
    for name in sorted(set(skipped(a)) ^ set(skipped(b))):
        owner = a if name in skipped(a) else b
        lines.append(f"only {owner.label} skipped the image {name}")
    for part in ("devices", "versions"):
        for key, (of_a, of_b) in record_differences(a, b, part).items():
            lines.append(f"{part} ({key}): {of_a} in {a.label}, {of_b} in {b.label}")
    return lines


def skipped(run: Run) -> list[str]:
    """Names of the training images that could not be read."""
    entries = (entry for entry in run.skipped if entry.get("use") == "train")
    return [str(entry.get("name")) for entry in entries]


def causes(a: Run, b: Run, found: Departure) -> list[str]:
    """What may be the reason for a departure, the closest to it first."""
    return list(itertools.chain(events(a, b, found), from_the_start(a, b)))
