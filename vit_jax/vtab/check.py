"""Whether the data of the tasks are there, whole and those of VTAB; and their preparation."""

import logging
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from vit_jax.data.sources.vtab_tasks import VTAB
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.vtab import task_data

log = logging.getLogger("vit_jax.vtab")

# Of what the user fetches, in GB; of the rest TFDS knows the size.
MANUAL_GB = {"resisc45": 0.4, "diabetic_retinopathy_detection/btgraham-300": 89.0}


def size_of(builder_name: str, builder) -> str:
    """What there is to download."""
    if gigabytes := MANUAL_GB.get(builder_name):
        return f"{gigabytes:g} GB"
    total = sum(info.size for info in (builder.url_infos or {}).values() if info.size)
    return (
        "size unknown"
        if not total
        else f"{total / 1e9:.1f} GB"
        if total > 1e9
        else f"{total / 1e6:.0f} MB"
    )


def what_to_do(name: str, found, data_dir: str) -> str:
    """Of data that were looked for, `data.sources.vtab.Found`."""
    task, builder = VTAB[name], found.builder
    where = f" --config.data.data_dir={data_dir}" if data_dir else ""
    command = f"python -m vit_jax.vtab prepare --config=configs/vtab.py --tasks={name}{where}"
    if found.state == "missing":
        return f"{size_of(task.builder, builder)}: {command}"
    if found.state == "manual":
        folder = builder.data_dir_root / "downloads" / "manual"
        steps = one_line(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
        return f"{size_of(task.builder, builder)} by hand into {folder}: {steps} Then {command}"
    if found.state in ("wrong count", "missing files"):
        return f"{found.detail}; remove {builder.data_dir}, then {command}"
    return found.detail


def check(config, names: Sequence[str]) -> dict[str, dict]:
    """State, details and, of what is ready, a fingerprint by task."""
    rows = {}
    for name in names:
        try:
            found = task_data.locate(name, config)
            rows[name] = dict(
                state=found.state,
                detail=what_to_do(name, found, config.data.data_dir),
                fingerprint=None,
            )
            if found.state == "ready":
                rows[name] |= of_ready(name, found)
        except UserError as error:
            rows[name] = dict(state="damaged", detail=one_line(error)[:300], fingerprint=None)
    return rows


def of_ready(name: str, found) -> dict:
    """The state of data that are there with the right counts, after a look at the 1,000 examples."""
    from vit_jax.vtab import fingerprint as fingerprints

    where = name, VTAB[name], found
    fingerprint = fingerprints.ids(*where) | dict(pixels=fingerprints.pixels(*where))
    state = dict(state="ready", fingerprint=fingerprint)
    if fingerprint["is_known"] is False:
        state |= dict(
            state="other examples",
            detail=f"{found.detail}: the 1,000 examples are not those of VTAB-1k",
        )
    elif found.is_generated:
        state |= dict(
            state="generated", detail=f"{found.detail}: made-up pixels, results are labelled"
        )
    return state


def show(rows: dict[str, dict]) -> None:
    table = Table("task", "state", "ids", "pixels", "where, or what to do", title="VTAB-1k")
    for name, row in rows.items():
        fingerprint = row["fingerprint"] or {}
        known = {True: "VTAB's", False: "others", None: "not known" if fingerprint else ""}[
            fingerprint.get("is_known")
        ]
        style = (
            None if row["state"] == "ready" else "yellow" if row["state"] == "generated" else "red"
        )
        table.add_row(
            name, row["state"], known, fingerprint.get("pixels", ""), row["detail"], style=style
        )
    Console(width=None if Console().is_terminal else 240).print(table)


def prepare(config, names: Sequence[str]) -> None:
    """Lets TFDS prepare what is missing, and where the config says so draws sprites in the place of
    dSprites.

    Raises:
      NegativeResult: some could not be prepared; the log says why.
    """
    from vit_jax.data.prepare import download
    from vit_jax.data.sources import tfds as tfds_source
    from vit_jax.vtab import sprites

    problems = {}
    for name in names:
        try:
            found = task_data.locate(name, config)
            if found.state in ("missing", "manual", "wrong version"):
                if config.vtab.generated and VTAB[name].builder == "dsprites":
                    sprites.write(config.data.data_dir or tfds_source.default_data_dir())
                else:
                    download.prepare_builder(found.builder, VTAB[name].builder)
                found = task_data.locate(name, config)
            if found.state != "ready":
                raise NegativeResult(
                    f"{found.state}: {what_to_do(name, found, config.data.data_dir)}"
                )
        except UserError as error:
            problems[name] = one_line(error)
            log.warning("%s: %s", name, problems[name])
    if problems:
        raise NegativeResult(
            f"{len(problems)} of {len(names)} tasks are not prepared: {', '.join(problems)}; see "
            "above"
        )
