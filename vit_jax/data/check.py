"""`vit_jax.data check`: for every data set that a config names, whether it is there, what it holds, how it looks."""

import pathlib
import re
import textwrap

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from vit_jax.data import catalog, pipeline, prepared, source, sources, storage
from vit_jax.errors import UserError

SHOWN = 64  # images of a contact sheet, eight in a row
SCAN_SIZE = 32  # pixels to which a scan resizes what it has decoded


def named(config) -> list[tuple[str, str, str, str]]:
    """(use, name, split, data_dir) of the training data and every evaluation."""
    data = config.data
    if data.name == "mixture":
        found = [("train", name, split, data.data_dir) for name, split, _ in catalog.mixture_parts(data)]
    else:
        found = [("train", data.name, data.split, data.data_dir)]
    for name, entry in config.evals.items():
        own = entry.data
        found.append((f"evals.{name}", own.name or data.name, own.split, own.data_dir or data.data_dir))
    return found


def overview(name: str, data_dir: str) -> dict:
    """Where a data set lies, its version, and the sizes of its splits."""
    if (listing := catalog.listing(name)) is not None:
        where, version = name.partition(":")[2] or "scikit-learn", listing.fingerprint
        return dict(where=where, version=version, splits={key: len(part) for key, part in listing.splits.items()})
    builder = prepared.builder_of(name, data_dir)
    counts = {key: part.num_examples for key, part in builder.info.splits.items()}
    return dict(where=str(builder.data_dir), version=str(builder.info.version), splits=counts)


def sample(config, opened: source.Source, use: str) -> dict:
    """One decoded batch, of at most `SHOWN` images: as training crops them, or as the evaluation does."""
    if use == "train":
        size = min(SHOWN, config.data.batch_size)
        host = pipeline.train_pipeline(config, opened, np.arange(size), 1)
    else:
        data = config.evals[use.removeprefix("evals.")].data
        size = min(SHOWN, opened.num_examples)
        host = pipeline.eval_pipeline(data, opened, np.arange(size), size, config.image_size, "skip")
    return next(host.dataset(0, 1, careful=True).as_numpy_iterator())


def contact_sheet(batch: dict, names, path: pathlib.Path) -> None:
    """Draws the images with their classes."""
    side, text = max(96, min(batch["image"].shape[1], 160)), 26
    rows = -(-len(batch["image"]) // 8)
    sheet = Image.new("RGB", (8 * (side + 4), rows * (side + text)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, label, mask) in enumerate(zip(batch["image"], batch["label"], batch["mask"], strict=True)):
        x, y = i % 8 * (side + 4), i // 8 * (side + text)
        sheet.paste(Image.fromarray(image).resize((side, side)), (x, y))
        caption = (str(names[label]) if names else f"class {label}") if mask else "can't be read"
        lines = textwrap.wrap(caption, side // 6)[:2]
        draw.multiline_text((x + 2, y + side + 1), "\n".join(lines), fill="black" if mask else "red", spacing=0)
    sheet.save(path)


def statistics(batch: dict) -> dict:
    """Mean and standard deviation of each channel, 0 to 1, over the images that could be read."""
    pixels = batch["image"][batch["mask"] > 0].reshape(-1, 3) / 255
    return dict(mean=pixels.mean(0).round(4).tolist(), std=pixels.std(0).round(4).tolist()) if len(pixels) else {}


def corrupt(config, opened: source.Source) -> list[str]:
    """Names of all images that can't be decoded: reads the whole split."""
    data = config.data.copy_and_resolve_references()
    data.crop = "resize"
    rows = np.arange(256)
    host = pipeline.eval_pipeline(data, opened, rows, len(rows), SCAN_SIZE, "skip", config.data.threads)
    for _ in host.batches():
        pass
    return [opened.describe(i) for i in sorted(host.bad)]


def check_one(config, args, use: str, name: str, split: str, data_dir: str) -> dict:
    """The report on one data set; what is wrong with it stands in `error`."""
    report = dict(use=use, name=name, split=split, ready=False)
    try:
        if not storage.is_local(data_dir or name.partition(":")[2]):
            storage.must_be_reachable(data_dir or name.partition(":")[2])
        report |= overview(name, data_dir)
        opened = sources.open_source(name, split, data_dir)
        batch = sample(config, opened, use)
        readable = batch["mask"] > 0
        report |= dict(num_examples=opened.num_examples, num_classes=opened.num_classes) | statistics(batch)
        sheet = pathlib.Path(args.out) / (re.sub(r"[^\w.-]+", "_", f"{use}_{name}_{split}").strip("_") + ".png")
        sheet.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(batch, opened.class_names, sheet)
        bad = [opened.describe(int(i)) for i in batch["id"][~readable]]
        bad = corrupt(config, opened) if args.scan else bad
        report |= dict(sheet=str(sheet), corrupt=bad, ready=not bad)
        if bad:
            report["error"] = f"{len(bad)} images can't be decoded, the first is {bad[0]}"
    except UserError as error:
        report["error"] = str(error)
    return report


def run(config, args) -> dict:
    """Checks all, prints a table, and returns the reports; `ready` says whether everything is."""
    reports = [check_one(config, args, *entry) for entry in named(config)]
    table = Table(title=None)
    for column in ("use", "data set", "split", "examples", "classes", "version", "mean", "std", "state"):
        table.add_column(column, overflow="fold")
    for report in reports:
        rounded = [" ".join(f"{value:.2f}" for value in report.get(key, ())) for key in ("mean", "std")]
        values = [f"{report[key]:,}" if key in report else "" for key in ("num_examples", "num_classes")]
        state = "ready" if report["ready"] else f"error: {report['error']}"
        table.add_row(
            report["use"], report["name"], report["split"], *values, report.get("version", ""), *rounded, state
        )
    Console().print(table)
    for report in reports:
        if "splits" in report:
            sizes = ", ".join(f"{name} {count:,}" for name, count in report["splits"].items())
            print(f"{report['use']}: {report['name']} in {report['where']}: {sizes}; see {report.get('sheet', '')}")
    bad = [report for report in reports if not report["ready"]]
    summary = "; ".join(f"{report['use']}: {report['error']}" for report in bad)
    return dict(ready=not bad, summary=summary, data=reports)
