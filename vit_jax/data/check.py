"""`vit_jax.data check`: for every data set that a config names, whether it is there, what it holds,
how it looks.
"""

import contextlib
import pathlib
import re
import tempfile
import textwrap

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_jax.data import pipeline
from vit_jax.data.sources import catalog, index_cache, source, storage, vtab_tasks
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.errors import UserError, one_line

SHOWN = 64  # images of a contact sheet, eight in a row
SCAN_SIZE = 32  # pixels to which a scan resizes what it has decoded
USUAL_SIZE = 224  # stands in for image_size=0 of evaluate, where the weights decide
LONGEST_NAME = 200  # bytes of a sheet's name; file systems allow 255


def must_be_reachable(name: str, data_dir: str) -> None:
    """Asks the network only about a store that the data set would really be read from."""
    kind, _, path = name.partition(":")
    where = path if kind in catalog.LISTED else "" if name == "digits" else data_dir
    if where.startswith("gs://"):
        storage.must_be_reachable(where)


def overview(name: str, data_dir: str) -> dict:
    """Where a data set lies, its version, and the sizes of its splits."""
    if (listing := catalog.listing(name)) is not None:
        where, version = name.partition(":")[2] or "scikit-learn", listing.fingerprint
        return dict(
            where=where,
            version=version,
            splits={key: len(part) for key, part in listing.splits.items()},
        )
    if name.startswith(vtab_tasks.PREFIX):
        task = vtab_tasks.vtab(name.removeprefix(vtab_tasks.PREFIX))
        builder = vtab_source.find(task, data_dir).builder
        counts = {part: count for part, (_, count) in task.splits.items()}
        return dict(where=str(builder.data_dir), version=str(builder.version), splits=counts)
    builder = tfds_source.builder_of(name, data_dir)
    counts = {key: part.num_examples for key, part in builder.info.splits.items()}
    return dict(where=str(builder.data_dir), version=str(builder.info.version), splits=counts)


def sample(config, opened: source.Source, use: str) -> dict:
    """One decoded batch, of at most `SHOWN` images: as training crops them, or as the evaluation
    does.
    """
    if use == "train":
        size = min(SHOWN, config.data.batch_size)
        host = pipeline.train_pipeline(config, opened, np.arange(size), 1)
    else:
        data = config.evals[use.removeprefix("evals.")].data
        size = min(SHOWN, len(opened))
        host = pipeline.eval_pipeline(
            data, opened, np.arange(size), size, config.image_size, "skip"
        )
    return next(host.dataset(0, 1, careful=True).as_numpy_iterator())


def sheet_path(folder: str, *parts: str) -> pathlib.Path:
    """The file of a contact sheet; a name that is too long is cut, and a hash keeps it apart from
    others.
    """
    stem = re.sub(r"[^\w.-]+", "_", "_".join(parts)).strip("_")
    if len(encoded := stem.encode()) > LONGEST_NAME:
        stem = (
            f"{encoded[: LONGEST_NAME - 20].decode(errors='ignore')}_{index_cache.digest(stem)[:8]}"
        )
    return pathlib.Path(folder) / f"{stem}.png"


def cant_write(folder: str, error: OSError) -> UserError:
    return UserError(
        f"--out={folder} can't be written ({error.strerror or one_line(error)}): choose another "
        "folder"
    )


def must_be_writable(folder: str) -> None:
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise cant_write(folder, error) from None


def contact_sheet(batch: dict, names, path: pathlib.Path) -> None:
    """Draws the images with their classes."""
    side, text = max(96, min(batch["image"].shape[1], 160)), 26
    rows = -(-len(batch["image"]) // 8)
    sheet = Image.new("RGB", (8 * (side + 4), rows * (side + text)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, label, mask) in enumerate(
        zip(batch["image"], batch["label"], batch["mask"], strict=True)
    ):
        x, y = i % 8 * (side + 4), i // 8 * (side + text)
        sheet.paste(Image.fromarray(image).resize((side, side)), (x, y))
        known = [str(names[i]) if names else f"class {i}" for i in np.atleast_1d(label) if i >= 0]
        caption = ", ".join(known) if mask else "can't be read"
        lines = textwrap.wrap(caption, side // 6)[:2]
        draw.multiline_text(
            (x + 2, y + side + 1), "\n".join(lines), fill="black" if mask else "red", spacing=0
        )
    sheet.save(path)


def statistics(batch: dict) -> dict:
    """Mean and standard deviation of each channel, 0 to 1, over the images that could be read."""
    pixels = batch["image"][batch["mask"] > 0].reshape(-1, 3) / 255
    return (
        dict(mean=pixels.mean(0).round(4).tolist(), std=pixels.std(0).round(4).tolist())
        if len(pixels)
        else {}
    )


def corrupt(config, opened: source.Source) -> list[str]:
    """Names of all images that can't be decoded: reads the whole split."""
    data = config.data.copy_and_resolve_references()
    data.crop = "resize"
    rows = np.arange(256)
    host = pipeline.eval_pipeline(
        data, opened, rows, len(rows), SCAN_SIZE, "skip", config.data.threads
    )
    for _ in host.batches():
        pass
    return [opened.describe(i) for i in sorted(host.bad)]


@contextlib.contextmanager
def noted(report: dict):
    """What goes wrong inside stands in `error` of the report."""
    try:
        yield
    except UserError as error:
        report["error"] = str(error)
    except (OSError, tf.errors.OpError) as error:
        report["error"] = (
            f"{report['name']} {report['split']} can't be read: {one_line(error)[:160]}"
        )


def blank(use: str, name: str, split: str) -> dict:
    return dict(use=use, name=name, split=split, ready=False)


def look(config, args, report: dict, opened: source.Source) -> None:
    """Adds to a report what the images of an opened data set are like, and draws some."""
    batch = sample(config, opened, report["use"])
    report |= statistics(batch)
    sheet = sheet_path(args.out, report["use"], report["name"], report["split"])
    try:
        contact_sheet(batch, opened.class_names, sheet)
    except OSError as error:
        raise cant_write(args.out, error) from None
    bad = [opened.describe(int(i)) for i in batch["id"][batch["mask"] == 0]]
    bad = corrupt(config, opened) if args.scan else bad
    report |= dict(sheet=str(sheet), corrupt=bad, ready=not bad)
    if bad:
        report["error"] = f"{len(bad)} images can't be decoded, the first is {bad[0]}"


def opened_as(report: dict, data_dir: str, open_it) -> source.Source:
    """Opens one data set, and adds to its report where it lies and what it holds."""
    must_be_reachable(report["name"], data_dir)
    report |= overview(report["name"], data_dir)
    opened = open_it()
    report |= dict(num_examples=len(opened), num_classes=opened.num_classes)
    return opened


def check_part(name: str, split: str, data_dir: str) -> dict:
    """The report on one part of a mixture, without its images: those of the whole are looked at."""
    report = blank("train", name, split)
    with noted(report):
        opened_as(report, data_dir, lambda: sources.open_source(name, split, data_dir))
        report["ready"] = True
    return report


def open_mixture(report: dict, parts: list[dict], data) -> source.Source:
    if missing := [part["error"] for part in parts if "error" in part]:
        raise UserError(missing[0])
    opened = sources.open_training(data)
    report |= dict(num_examples=len(opened), num_classes=opened.num_classes)
    return opened


def check_training(config, args) -> tuple[list[dict], catalog.Facts | None]:
    """Reports on the parts of a mixture and on the training data as a whole, and its facts if
    training takes it.
    """
    data, parts, facts = config.data, [], None
    if data.name == "mixture":
        parts = [
            check_part(name, split, data.data_dir) for name, split, _ in catalog.mixture_parts(data)
        ]
    report = blank("train", data.name, "" if parts else data.split)
    with noted(report):
        if parts:
            opened = open_mixture(report, parts, data)
        else:
            opened = opened_as(report, data.data_dir, lambda: sources.open_training(data))
        facts = catalog.found(config, opened)
        look(config, args, report, opened)
    return [*parts, report], facts


def check_eval(config, args, name: str, facts: catalog.Facts | None) -> dict:
    """The report on one evaluation; with `facts`, whether a model of these classes can be evaluated
    on it.
    """
    data = config.evals[name].data
    called, data_dir = data.name or config.data.name, data.data_dir or config.data.data_dir
    report = blank(f"evals.{name}", called, data.split)
    with noted(report):
        opened = opened_as(
            report, data_dir, lambda: sources.open_source(called, data.split, data_dir)
        )
        if facts:
            opened = source.with_classes(
                opened, facts.class_names, facts.num_classes, f"evals.{name}"
            )
        look(config, args, report, opened)
    return report


def tell(reports: list[dict]) -> None:
    """Prints a table, and below it the splits of each data set."""
    table = Table(title=None)
    for column in (
        "use",
        "data set",
        "split",
        "examples",
        "classes",
        "version",
        "mean",
        "std",
        "state",
    ):
        table.add_column(column, overflow="fold")
    for report in reports:
        rounded = [
            " ".join(f"{value:.2f}" for value in report.get(key, ())) for key in ("mean", "std")
        ]
        values = [
            f"{report[key]:,}" if key in report else "" for key in ("num_examples", "num_classes")
        ]
        state = "ready" if report["ready"] else f"error: {report['error']}"
        row = (
            report["use"],
            report["name"],
            report["split"],
            *values,
            report.get("version", ""),
            *rounded,
            state,
        )
        table.add_row(*map(Text, row))  # names may hold what Rich takes for markup
    Console().print(table)
    for report in reports:
        if "splits" in report:
            sizes = ", ".join(f"{name} {count:,}" for name, count in report["splits"].items())
            seen = f"; see {report['sheet']}" if "sheet" in report else ""
            print(f"{report['use']}: {report['name']} in {report['where']}: {sizes}{seen}")
        elif "sheet" in report:
            print(f"{report['use']}: {report['name']}; see {report['sheet']}")


def run(config, args) -> dict:
    """Checks all, prints it, and returns the reports; `ready` says whether everything is."""
    must_be_writable(args.out)
    weights_decide = not config.image_size
    if weights_decide:
        config = config.copy_and_resolve_references()
        config.image_size = USUAL_SIZE
    reports, facts = check_training(config, args)
    reports += [
        check_eval(config, args, name, None if weights_decide else facts) for name in config.evals
    ]
    tell(reports)
    bad = [report for report in reports if not report["ready"]]
    # A mixture repeats what is wrong with its first bad part.
    summary = "; ".join(dict.fromkeys(f"{report['use']}: {report['error']}" for report in bad))
    return dict(ready=not bad, summary=summary, data=reports)
