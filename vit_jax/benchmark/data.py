"""`vit_jax.benchmark data`: core time per image of every stage of the input pipeline, and how many
cores feed a pod.
"""

import dataclasses
import json
import math
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import tensorflow as tf

from vit_jax.benchmark.rows import row
from vit_jax.data import images, pipeline, to_device
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.data.sources import catalog
from vit_jax.data.sources import open as sources
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.train import experiment

SIZES = re.compile(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,2}")  # of a topology
WARMUP = 4  # batches that are not counted: files get cached, threads start


def core_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mib() -> float:
    """The largest resident memory that this program has had. (Linux's ru_maxrss begins at that of
    the parent.)
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(batches: Iterator, images: int, batch_size: int) -> tuple[float, float]:
    """(core-ms per image, images/s) of an iterator that runs already."""
    count = max(images // batch_size, 1)
    cpu, wall = core_seconds(), time.perf_counter()
    for _ in range(count):
        next(batches)
    cpu, wall = core_seconds() - cpu, time.perf_counter() - wall
    return 1e3 * cpu / (count * batch_size), count * batch_size / wall


def stages(config, host: pipeline.Pipeline) -> dict[str, pipeline.Pipeline]:
    """The pipeline cut off behind each of its stages; what follows costs nothing."""
    blank = tf.zeros([host.size, host.size, 3], tf.uint8)

    def instead(image: Callable) -> pipeline.Pipeline:
        return dataclasses.replace(host, image=image)

    def behind(value):
        with tf.control_dependencies([value]):
            return tf.identity(blank)

    whole = {"read and parse": instead(lambda encoded, seed: behind(encoded))}
    if config.data.crop == "inception":
        area = config.data.area_min
        whole["decode and crop"] = instead(
            lambda encoded, seed: behind(images.decode_box(encoded, seed, area))
        )
    else:
        whole["decode"] = instead(lambda encoded, seed: behind(images.decode(encoded)))
    return whole | {"resize": host}


def host_rows(config, host: pipeline.Pipeline, args) -> list[dict]:
    """Core time of each stage, as the difference to the stage before it, measured in turn."""
    size, found = config.data.batch_size, {}
    iterators = {name: one.batches() for name, one in stages(config, host).items()}
    for iterator in iterators.values():
        measure(iterator, WARMUP * size, size)
    for _ in range(args.runs):
        for name, iterator in iterators.items():
            found.setdefault(name, []).append(measure(iterator, args.images, size))
    rows, before = [], [0.0] * args.runs
    for name, runs in found.items():
        cost = [cpu for cpu, _ in runs]
        rows.append(
            row(
                f"host: {name}", "core-ms/image", [a - b for a, b in zip(cost, before, strict=True)]
            )
        )
        before = cost
    whole = found["resize"]
    rows.append(row("host: all", "core-ms/image", [cpu for cpu, _ in whole]))
    rows.append(row("host: all", "images/s", [speed for _, speed in whole]))
    return rows


def device_rows(config, host: pipeline.Pipeline, args) -> list[dict]:
    """Transfer to the devices, and augmentation on them."""
    mesh, size = meshes.make_mesh(config.mesh), config.data.batch_size
    batch = next(host.batches())
    rows, wanted = (
        sharding.local_rows(mesh, size),
        {key: batch[key] for key in ("image", "label", "mask", "seed")},
    )
    model = experiment.make_model(config, host.source.num_classes)
    prepare = jax.jit(make_preprocess(config, model.normalize, model.num_classes))
    key, placed = jax.random.key(0), to_device.global_batch(wanted, mesh, rows, size)
    jax.block_until_ready(prepare(placed, key))
    transfer, device = [], []
    for _ in range(args.runs):
        start = time.perf_counter()
        placed = jax.block_until_ready(to_device.global_batch(wanted, mesh, rows, size))
        middle = time.perf_counter()
        jax.block_until_ready(prepare(placed, key))
        transfer.append(1e3 * (middle - start) / size)
        device.append(1e3 * (time.perf_counter() - middle) / size)
    count = sum(value.nbytes for value in wanted.values()) / size
    kind = jax.devices()[0].device_kind
    return [
        row("transfer to the devices", "ms/image", transfer),
        row("transfer to the devices", "bytes/image", [count]),
        row(f"device ({jax.device_count()} x {kind}): augment, normalize, mix", "ms/image", device),
    ]


def chips_of(topology: str) -> tuple[str, int]:
    """("TPU v5e", 256) for "v5e:16x16".

    Raises:
      UserError: the chip is not known, or there are no sizes.
    """
    chip, _, sizes = topology.partition(":")
    known = [
        kind.removeprefix("TPU ")
        for kind in hardware.PEAK_FLOPS
        if kind.startswith("TPU v") and " lite" not in kind
    ]
    if chip not in known or not SIZES.fullmatch(sizes):
        raise UserError(
            f"--topology={topology} is not understood: write CHIP:AxB, with a chip of "
            f"{', '.join(known)}"
        )
    return f"TPU {chip}", math.prod(map(int, sizes.split("x")))


def pod_rows(config, num_classes: int, core_ms: float, kind: str, count: int, args) -> list[dict]:
    """What `count` chips of a `kind` take, and the host cores that feed them."""
    flops = 3 * experiment.make_model(config, num_classes).flops
    speed = count * hardware.PEAK_FLOPS[kind] * args.mfu / flops
    return [
        row(f"{args.topology} at {args.mfu:.0%} MFU takes", "images/s", [speed]),
        row(f"cores that feed {args.topology}", "cores", [speed * core_ms / 1e3]),
    ]


def alone(config, host: pipeline.Pipeline, args) -> dict:
    """The whole host pipeline in a process of its own, so that its peak of memory is its own."""
    size, batches = config.data.batch_size, host.batches()
    measure(batches, WARMUP * size, size)
    cost, speed = measure(batches, args.images, size)
    batch = next(batches)
    count = sum(batch[key].nbytes for key in ("image", "label", "mask", "seed")) / size
    return dict(
        images_per_sec=speed,
        core_ms_per_image=cost,
        peak_rss_mib=peak_mib(),
        bytes_per_image_to_device=count,
    )


def commands(config, args, overrides: list[str]) -> dict[str, list[str]]:
    """The processes that are measured in turn: ours, and big_vision's on the same files and with
    the same work.
    """
    data, images = config.data, f"--images={args.images}"
    if not args.peer:
        raise UserError(
            "--peer is missing: give the folder of the checkout, as --against=big_vision --peer=DIR"
        )
    if data.crop != "inception" or data.three_augment or not data.data_dir:
        raise UserError(
            "--against=big_vision measures inception crops of TFDS data below data.data_dir: "
            "choose such"
        )
    ours = [
        sys.executable,
        "-m",
        "vit_jax.benchmark",
        "data",
        f"--config={args.config}",
        *overrides,
        "--alone",
        images,
    ]
    peer = [
        sys.executable,
        "-m",
        "comparisons.big_vision_data",
        f"--big_vision={args.peer}",
        images,
    ]
    peer += [
        f"--data_dir={data.data_dir}",
        f"--name={data.name}",
        f"--batch_size={data.batch_size}",
    ]
    return {"ours": ours, args.against: peer + (["--randaug"] if data.randaug_layers else [])}


def against_rows(commands: dict[str, list[str]], args) -> list[dict]:
    """Both pipelines, A B A B, each run in a fresh process, and the ratios of the medians."""
    found: dict[str, list[dict]] = {}
    for _ in range(args.runs):
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise UserError(f"the run of {name} failed: {last[:300]}")
            found.setdefault(name, []).append(json.loads(done.stdout.strip().splitlines()[-1]))
    units = dict(
        images_per_sec="images/s",
        core_ms_per_image="core-ms/image",
        peak_rss_mib="MiB",
        bytes_per_image_to_device="bytes",
    )
    rows = [
        row(f"{name}: {key}", unit, [run[key] for run in runs])
        for key, unit in units.items()
        for name, runs in found.items()
    ]
    medians = {r["name"]: r["median"] for r in rows}
    for key in ("core_ms_per_image", "peak_rss_mib", "bytes_per_image_to_device"):
        rows.append(
            row(
                f"ours / {args.against}: {key}",
                "ratio",
                [medians[f"ours: {key}"] / medians[f"{args.against}: {key}"]],
            )
        )
    return rows


def run(config, args, overrides: list[str]):
    """All rows: `name`, `unit`, `median`, `runs`."""
    if config.data.batch_size > args.images:
        raise UserError(
            f"--images={args.images} is less than a batch of {config.data.batch_size}: measure more"
        )
    if args.runs < 1 or not 0 < args.mfu <= 1:  # a NaN is not above 0
        raise UserError(
            f"--runs={args.runs} must be above 0, and --mfu={args.mfu} above 0 and at most 1: "
            "correct them"
        )
    if not config.image_size:
        raise UserError(
            "config key image_size=0 is for evaluate only: give that of a training, as 224"
        )
    kind, count = chips_of(args.topology) if args.topology else ("", 0)
    peers = commands(config, args, overrides) if args.against else {}
    source = sources.open_training(config.data)
    catalog.found(config, source)
    host = pipeline.train_pipeline(config, source, np.arange(config.data.batch_size), 2**31)
    if args.alone:
        return alone(config, host, args)
    rows = [*host_rows(config, host, args), row("peak memory of the host", "MiB", [peak_mib()])]
    rows += device_rows(config, host, args)
    if args.topology:
        cost = next(
            r["median"] for r in rows if r["name"] == "host: all" and r["unit"] == "core-ms/image"
        )
        rows += pod_rows(config, source.num_classes, cost, kind, count, args)
    return rows + (against_rows(peers, args) if peers else [])
