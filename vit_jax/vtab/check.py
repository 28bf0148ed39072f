"""Checks whether the data of the tasks are there, complete and those of VTAB-1k; prepares what is
missing.
"""

import logging
from collections.abc import Sequence

from rich.table import Table

from vit_jax.cli.terminal import Console
from vit_jax.data.sources.vtab_tasks import VTAB
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.vtab import task_data

log = logging.getLogger("vit_jax.vtab")

# Size in GB of what the user downloads by hand; TFDS knows the size of the rest.
MANUAL_GB = {"resisc45": 0.4, "diabetic_retinopathy_detection/btgraham-300": 89.0}
ID_NOTES = {True: "VTAB's", False: "others", None: "not known"}


def download_size(builder_name: str, builder) -> str:
    if builder_name in MANUAL_GB:
        return f"{MANUAL_GB[builder_name]:g} GB"
    total = sum(info.size for info in (builder.url_infos or {}).values() if info.size)
    if not total:
        return "size unknown"
    if total > 1e9:
        return f"{total / 1e9:.1f} GB"
    return f"{total / 1e6:.0f} MB"


def advice(name: str, found, data_dir: str) -> str:
    """What is wrong with data that are not ready, and what to do about it.

    Args:
      found: the `data.sources.vtab.Found` of the task.
    """
    builder = found.builder
    command = f"python -m vit_jax.vtab prepare --config=configs/vtab.py --tasks={name}"
    if data_dir:
        command += f" --config.data.data_dir={data_dir}"
    if found.state in ("wrong count", "missing files"):
        return f"{found.detail}; remove {builder.data_dir}, then {command}"
    if found.state not in ("missing", "manual"):
        return found.detail
    size = download_size(VTAB[name].builder, builder)
    if found.state == "manual":
        folder = builder.data_dir_root / "downloads" / "manual"
        steps = one_line(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
        return f"{size} by hand into {folder}: {steps} Then {command}"
    return f"{size}: {command}"


def check(config, names: Sequence[str]) -> dict[str, dict]:
    """For every task its state, details and, if it is ready, a fingerprint."""
    return {name: check_task(config, name) for name in names}


def check_task(config, name: str) -> dict:
    try:
        found = task_data.locate(name, config)
        if found.state == "ready":
            return check_examples(name, found)
    except UserError as error:
        return dict(state="damaged", detail=one_line(error)[:300], fingerprint=None)
    detail = advice(name, found, config.data.data_dir)
    return dict(state=found.state, detail=detail, fingerprint=None)


def check_examples(name: str, found) -> dict:
    """Reads the 1,000 examples of data that have the right counts."""
    from vit_jax.data.sources import vtab_fingerprint

    task = VTAB[name]
    fingerprint = vtab_fingerprint.ids(name, task, found)
    fingerprint["pixels"] = vtab_fingerprint.pixels(name, task, found)
    state = "ready"
    detail = found.detail
    if fingerprint["is_known"] is False:
        state = "other examples"
        detail += ": the 1,000 examples are not those of VTAB-1k"
    return dict(state=state, detail=detail, fingerprint=fingerprint)


def show(rows: dict[str, dict]) -> None:
    table = Table("task", "state", "ids", "pixels", "where, or what to do", title="VTAB-1k")
    for name, row in rows.items():
        ids = pixels = ""
        if row["fingerprint"]:
            ids = ID_NOTES[row["fingerprint"]["is_known"]]
            pixels = row["fingerprint"]["pixels"]
        style = None if row["state"] == "ready" else "red"
        table.add_row(name, row["state"], ids, pixels, row["detail"], style=style)
    Console(width=None if Console().is_terminal else 240).print(table)


def prepare(config, names: Sequence[str]) -> None:
    """Lets TFDS download and build what is missing.

    Raises:
      NegativeResult: some tasks could not be prepared; the log says why.
    """
    problems = {}
    for name in names:
        try:
            prepare_task(config, name)
        except UserError as error:
            problems[name] = one_line(error)
            log.warning("%s: %s", name, problems[name])
    if problems:
        raise NegativeResult(
            f"{len(problems)} of {len(names)} tasks are not prepared: {', '.join(problems)}; see "
            "above"
        )


def prepare_task(config, name: str) -> None:
    from vit_jax.data.prepare import download

    found = task_data.locate(name, config)
    if found.state in ("missing", "manual", "wrong version"):
        download.prepare_builder(found.builder, VTAB[name].builder)
        found = task_data.locate(name, config)
    if found.state != "ready":
        raise NegativeResult(f"{found.state}: {advice(name, found, config.data.data_dir)}")
