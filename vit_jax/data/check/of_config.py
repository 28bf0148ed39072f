"""`vit_jax.data check --config=...`: for every data set of a config, whether it can be read, what
it contains, and a contact sheet of its images.
"""

import contextlib
from collections.abc import Callable

import ml_collections
import numpy as np
import tensorflow as tf
from rich.table import Table

from vit_jax import config as configs
from vit_jax.cli import out_folder
from vit_jax.cli.terminal import Console
from vit_jax.config import eval_defaults, is_own
from vit_jax.data import pipeline
from vit_jax.data.check import contact_sheet
from vit_jax.data.sources import catalog, ignored, source, splits, vtab_tasks
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.errors import UserError, one_line, printable

SCAN_SIZE = 32  # pixels, to which --scan resizes the images
USUAL_SIZE = 224  # used for image_size=0, which lets the weights decide in evaluate


def overview(name: str, data_dir: str, labelled: bool) -> dict:
    """The location of a data set, its version, and the sizes of its splits; nothing is known of one
    of the user's own.
    """
    if is_own(name):
        return {}
    listing = catalog.listing(name, labelled)
    if listing is not None:
        where = name.partition(":")[2] or "scikit-learn"
        counts = {key: len(part) for key, part in splits.without_aliases(listing.splits).items()}
        found = dict(where=where, version=listing.fingerprint, splits=counts)
        return found | dict(ignored=dict(listing.ignored))
    if name.startswith(vtab_tasks.PREFIX):
        task = vtab_tasks.vtab(name.removeprefix(vtab_tasks.PREFIX))
        builder = vtab_source.find(task, data_dir).builder
        counts = {part: count for part, (_, count) in task.splits.items()}
        return dict(where=str(builder.data_dir), version=str(builder.version), splits=counts)
    builder = tfds_source.builder_of(name, data_dir)
    counts = {key: part.num_examples for key, part in builder.info.splits.items()}
    return dict(where=str(builder.data_dir), version=str(builder.info.version), splits=counts)


def sample(config, opened: source.Source, use: str) -> dict:
    """One decoded batch of images for the contact sheet, cropped as by the training or evaluation
    that uses them, the latter for weights that expect what the published ones do.
    """
    if use == "train":
        size = min(contact_sheet.SHOWN, config.data.batch_size)
        host = pipeline.train_pipeline(config, opened, np.arange(size), 1)
    else:
        data = config.evals[use.removeprefix("evals.")].data
        size = min(contact_sheet.SHOWN, len(opened))
        host = pipeline.eval_pipeline(
            data,
            opened,
            np.arange(size),
            size,
            config.image_size,
            "skip",
            exif_rotation=config.data.exif_rotation,
        )
    return next(host.arrays(0, 1, skip_failures=True))


def statistics(batch: dict) -> dict:
    """Mean and standard deviation of each channel, 0 to 1, over the images that could be read."""
    pixels = batch["image"][batch["mask"] > 0].reshape(-1, 3) / 255
    if not len(pixels):
        return {}
    return dict(mean=pixels.mean(0).round(4).tolist(), std=pixels.std(0).round(4).tolist())


def corrupt_images(config, opened: source.Source) -> list[str]:
    """Names of all images that can't be decoded; reads the whole split."""
    data = ml_collections.ConfigDict(eval_defaults()["data"])
    data.crop = "resize"
    rows = np.arange(256)
    host = pipeline.eval_pipeline(
        data, opened, rows, len(rows), SCAN_SIZE, "skip", config.data.threads
    )
    for _ in host.batches():
        pass
    return [opened.describe(i) for i in sorted(host.skipped)]


@contextlib.contextmanager
def errors_in(report: dict):
    """Catches an error and puts it into `error` of the report."""
    try:
        yield
    except UserError as error:
        report["error"] = str(error)
    except (OSError, tf.errors.OpError) as error:
        report["error"] = (
            f"{report['name']} {report['split']} can't be read: {one_line(error)[:160]}"
        )


def new_report(use: str, name: str, split: str) -> dict:
    return dict(use=use, name=name, split=split, ready=False)


def check_images(config, args, report: dict, opened: source.Source) -> None:
    """Decodes some or all images of an opened data set: statistics, contact sheet, corrupt ones."""
    batch = sample(config, opened, report["use"])
    report |= statistics(batch)
    sheet = contact_sheet.file_of(args.out, report["use"], report["name"], report["split"])
    contact_sheet.draw(batch, opened.class_names if opened.num_classes else None, sheet)
    if args.scan:
        corrupt = corrupt_images(config, opened)
    else:
        corrupt = [opened.describe(int(i)) for i in batch["id"][batch["mask"] == 0]]
    report |= dict(sheet=str(sheet), corrupt=corrupt, ready=not corrupt)
    if corrupt:
        report["error"] = f"{len(corrupt)} images can't be decoded, the first is {corrupt[0]}"


def open_for(
    report: dict, data_dir: str, open_it: Callable, labelled: bool = True
) -> source.Source:
    """Opens one data set, and adds its location and contents to its report."""
    sources.must_be_reachable(report["name"], data_dir)
    report |= overview(report["name"], data_dir, labelled)
    opened = open_it()
    report |= dict(num_examples=len(opened), num_classes=opened.num_classes)
    return opened


def check_part(config, name: str, split: str) -> dict:
    """The report on one part of a mixture, without images: those of the mixture are checked."""
    data_dir = config.data.data_dir
    labelled = configs.uses_labels(config)
    report = new_report("train", name, split)
    with errors_in(report):
        open_for(
            report,
            data_dir,
            lambda: sources.open_source(name, split, data_dir, config.user, labelled),
            labelled,
        )
        report["ready"] = True
    return report


def open_mixture(report: dict, parts: list[dict], open_it: Callable) -> source.Source:
    errors = [part["error"] for part in parts if "error" in part]
    if errors:
        raise UserError(errors[0])
    opened = open_it()
    report |= dict(num_examples=len(opened), num_classes=opened.num_classes)
    return opened


def check_training(config, args) -> tuple[list[dict], catalog.Facts | None]:
    """Reports on the parts of a mixture and on the training data as a whole, and their facts if
    training would accept them.
    """
    data = config.data
    labelled = configs.uses_labels(config)
    parts = []
    facts = None

    def open_it() -> source.Source:
        return sources.open_training(data, config.user, labelled)

    if data.name == "mixture":
        for name, split, _ in catalog.mixture_parts(data):
            parts.append(check_part(config, name, split))
    report = new_report("train", data.name, "" if parts else data.split)
    with errors_in(report):
        if parts:
            opened = open_mixture(report, parts, open_it)
        else:
            opened = open_for(report, data.data_dir, open_it, labelled)
        facts = catalog.found(config, opened)
        check_images(config, args, report, opened)
    return [*parts, report], facts


def check_eval(config, args, name: str, facts: catalog.Facts | None) -> dict:
    """The report on the data of one evaluation. With `facts` of the training data, it also checks
    whether a model of these classes can be evaluated on them.
    """
    data = config.evals[name].data
    data_name = data.name or config.data.name
    data_dir = data.data_dir or config.data.data_dir
    report = new_report(f"evals.{name}", data_name, data.split)
    with errors_in(report):
        opened = open_for(
            report,
            data_dir,
            lambda: sources.open_source(data_name, data.split, data_dir, config.user),
        )
        if facts and config.evals[name].type == "classification":
            opened = source.with_classes(
                opened, facts.class_names, facts.num_classes, f"evals.{name}"
            )
        check_images(config, args, report, opened)
    return report


def table_row(report: dict) -> dict[str, str]:
    """Column -> text."""

    def count(key: str) -> str:
        return f"{report[key]:,}" if key in report else ""

    def channels(key: str) -> str:
        return " ".join(f"{value:.2f}" for value in report.get(key, ()))

    return {
        "use": report["use"],
        "data set": report["name"],
        "split": report["split"],
        "examples": count("num_examples"),
        "classes": count("num_classes"),
        "version": report.get("version", ""),
        "mean": channels("mean"),
        "std": channels("std"),
        "state": "ready" if report["ready"] else f"error: {report['error']}",
    }


def print_reports(reports: list[dict]) -> None:
    """Prints a table, and below it the splits of each data set."""
    rows = [table_row(report) for report in reports]
    table = Table(title=None)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    for report in reports:
        if "splits" in report:
            sizes = ", ".join(f"{name} {count:,}" for name, count in report["splits"].items())
            unused = report.get("ignored")
            others = f"; ignored are {ignored.text(unused)}" if unused else ""
            sheet = f"; see {report['sheet']}" if "sheet" in report else ""
            text = f"{report['use']}: {report['name']} in {report['where']}: {sizes}{others}{sheet}"
            print(printable(text))
        elif "sheet" in report:
            print(printable(f"{report['use']}: {report['name']}; see {report['sheet']}"))


def run(config, args) -> dict:
    """Checks every data set of a config, prints and returns the reports; `ready` is true if all
    are.
    """
    out_folder.make(args.out)
    weights_decide = not config.image_size
    if weights_decide:
        config = config.copy_and_resolve_references()
        config.image_size = USUAL_SIZE
    reports, facts = check_training(config, args)
    reports += [
        check_eval(config, args, name, None if weights_decide else facts) for name in config.evals
    ]
    print_reports(reports)
    errors = [f"{report['use']}: {report['error']}" for report in reports if not report["ready"]]
    # The error of a mixture is that of its first part with one.
    return dict(ready=not errors, summary="; ".join(dict.fromkeys(errors)), data=reports)
