"""`vit_jax.benchmark data`: core time per image of every stage of the input pipeline, and how many
cores a pod needs.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import tensorflow as tf

from vit_jax import config as configs
from vit_jax.benchmark import threads
from vit_jax.benchmark.core_time import WARMUP, measure, peak_mib
from vit_jax.benchmark.rows import row
from vit_jax.data import images, pipeline, to_device
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.data.sources import catalog, simulated_store
from vit_jax.data.sources import open as sources
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.train import experiment
from vit_jax.train import teacher as teachers

SIZES = re.compile(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,2}")  # of a topology
# As on a store, images are read some thousands ahead: measurements must be longer.
DISTANT_WARMUP = 4 * pipeline.READ_AT_ONCE_DISTANT
DISTANT_IMAGES = 16 * pipeline.READ_AT_ONCE_DISTANT


def stages(config, host: pipeline.Pipeline) -> dict[str, pipeline.Pipeline]:
    """The pipeline cut off after each of its stages; the others are replaced by a constant."""
    blank = {name: tf.zeros(shape, tf.uint8) for name, shape in host.shapes.items()}

    def until(stage: Callable) -> pipeline.Pipeline:
        def pixels(encoded, seed, rotates):
            with tf.control_dependencies([stage(encoded, seed, rotates)]):
                return tf.nest.map_structure(tf.identity, blank)

        return dataclasses.replace(host, pixels=pixels)

    found = {"read and parse": until(lambda encoded, seed, rotates: encoded)}
    if configs.has_views(config):
        found["decode"] = until(
            lambda encoded, seed, rotates: images.decode(encoded, rotates=rotates)
        )
    else:
        name = "decode and crop" if config.data.crop in images.BOXES else "decode"
        found[name] = until(images.train_decode(config.data, config.image_size))
    found["resize"] = host
    return found


def host_rows(config, host: pipeline.Pipeline, args) -> list[dict]:
    """Core time of each stage, as the difference from the stage before it, in alternating runs."""
    size = config.data.batch_size
    iterators = {name: one.batches() for name, one in stages(config, host).items()}
    for iterator in iterators.values():
        measure(iterator, WARMUP * size, size)
    found = {name: [] for name in iterators}
    for _ in range(args.runs):
        for name, iterator in iterators.items():
            found[name].append(measure(iterator, args.images, size))
    rows = []
    before = [0.0] * args.runs
    for name, runs in found.items():
        cost = [cpu for cpu, _ in runs]
        difference = [total - earlier for total, earlier in zip(cost, before, strict=True)]
        rows.append(row(f"host: {name}", "core-ms/image", difference))
        before = cost
    whole = found["resize"]
    rows.append(row("host: all", "core-ms/image", [cpu for cpu, _ in whole]))
    rows.append(row("host: all", "images/s", [speed for _, speed in whole]))
    return rows


def device_rows(config, host: pipeline.Pipeline, args) -> list[dict]:
    """Transfer to the devices, and augmentation on them."""
    size = config.data.batch_size
    mesh = meshes.make_mesh(config.mesh)
    rows = sharding.local_rows(mesh, size)
    batch = host_batch(host.batches())
    model = experiment.make_model(config, host.source.num_classes)
    preprocess = jax.jit(make_preprocess(config, model.normalize, model.num_classes))
    key = jax.random.key(0)
    on_device = to_device.global_batch(batch, mesh, rows, size)
    jax.block_until_ready(preprocess(on_device, key))
    transfer = []
    device = []
    for _ in range(args.runs):
        start = time.perf_counter()
        on_device = jax.block_until_ready(to_device.global_batch(batch, mesh, rows, size))
        sent = time.perf_counter()
        jax.block_until_ready(preprocess(on_device, key))
        transfer.append(1e3 * (sent - start) / size)
        device.append(1e3 * (time.perf_counter() - sent) / size)
    kind = jax.devices()[0].device_kind
    return [
        row("transfer to the devices", "ms/image", transfer),
        row("transfer to the devices", "bytes/image", [bytes_per_image(batch, size)]),
        row(f"device ({jax.device_count()} x {kind}): augment, normalize, mix", "ms/image", device),
    ]


def host_batch(batches: Iterator) -> dict[str, np.ndarray]:
    """The arrays of the next batch that go to the devices."""
    return to_device.for_device(next(batches))


def bytes_per_image(batch: dict[str, np.ndarray], size: int) -> float:
    return sum(value.nbytes for value in batch.values()) / size


def chips_of(topology: str) -> tuple[str, int]:
    """("TPU v5e", 256) for "v5e:16x16"."""
    chip, _, sizes = topology.partition(":")
    tpus = [kind for kind in hardware.PEAK_FLOPS if kind.startswith("TPU v")]
    known = [kind.removeprefix("TPU ") for kind in tpus if " lite" not in kind]
    if chip not in known or not SIZES.fullmatch(sizes):
        raise UserError(
            f"--topology={topology} is not understood: write CHIP:AxB with CHIP one of "
            f"{', '.join(known)}"
        )
    return f"TPU {chip}", math.prod(map(int, sizes.split("x")))


def pod_rows(config, facts, core_ms: float, kind: str, count: int, args) -> list[dict]:
    """The images/s that `count` chips of a `kind` process, and the host cores that they need."""
    mesh = meshes.make_mesh(config.mesh)
    teacher = teachers.declared(config, facts.num_classes)
    built = experiment.Experiment.build(config, facts, mesh, teacher=teacher)
    flops = built.objective.train_flops
    speed = count * hardware.PEAK_FLOPS[kind] * args.mfu / flops
    return [
        row(f"{args.topology} at {args.mfu:.0%} MFU takes", "images/s", [speed]),
        row(f"cores that feed {args.topology}", "cores", [speed * core_ms / 1e3]),
    ]


def at_distance(config, host: pipeline.Pipeline, store: simulated_store.Simulated, args) -> dict:
    """The host pipeline with the latency of a store, alone in its process.

    Counted are the images that come out of the pipeline, or those that are read meanwhile if they
    are fewer: otherwise what was read ahead before the measurement would count.
    """
    size = config.data.batch_size
    if not host.source.distant:
        raise UserError(
            "--latency_ms measures array_record, tfrecord and tars on a local disk: set data.name "
            "and data.data_dir to such data"
        )
    batches = host.batches()
    measure(batches, DISTANT_WARMUP, size)
    host.stages.take()
    before = store.requests
    count = max(args.images, DISTANT_IMAGES)
    _, speed = measure(batches, count, size)
    read = host.stages.spent["read"][1]
    return dict(
        images_per_sec=speed * min(1, read / (count // size * size)),
        images_per_request=read / (store.requests - before),
        peak_rss_mib=peak_mib(),
    )


def alone(config, host: pipeline.Pipeline, args) -> dict:
    """The whole host pipeline, alone in its process, so that the peak of memory is its own."""
    size = config.data.batch_size
    batches = host.batches()
    measure(batches, WARMUP * size, size)
    cost, speed = measure(batches, args.images, size)
    return dict(
        images_per_sec=speed,
        core_ms_per_image=cost,
        peak_rss_mib=peak_mib(),
        bytes_per_image_to_device=bytes_per_image(host_batch(batches), size),
    )


def commands(config, args) -> dict[str, list[str]]:
    """The commands of both contenders: ours, and big_vision's on the same files with the same
    work.
    """
    data = config.data
    if not args.peer:
        raise UserError(
            "--peer is missing: name the folder of the checkout of big_vision, --peer=DIR"
        )
    if data.get("crop") != "inception" or data.three_augment or not data.data_dir:
        raise UserError(
            "--against=big_vision measures inception crops of TFDS data: set data.crop=inception, "
            "data.three_augment=False and data.data_dir"
        )
    images = f"--images={args.images}"
    ours = [sys.executable, "-m", "vit_jax.benchmark", "data", f"--config={args.location}"]
    ours += [*args.overrides, "--alone", images]
    peer = [sys.executable, "-m", "comparisons.big_vision_data", f"--big_vision={args.peer}"]
    peer += [images, f"--data_dir={data.data_dir}", f"--name={data.name}"]
    peer += [f"--batch_size={data.batch_size}"]
    if data.randaug_layers:
        peer.append("--randaug")
    return {"ours": ours, args.against: peer}


def run_alone(name: str, command: list[str]) -> dict:
    """What a fresh process measures."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the run of {name} failed: {last[:300]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def distance_rows(args) -> list[dict]:
    """The pipeline on local files and as on a store, in alternating runs (A B A B), each in a fresh
    process.
    """
    local = [sys.executable, "-m", "vit_jax.benchmark", "data", f"--config={args.location}"]
    local += [*args.overrides, "--alone", f"--images={max(args.images, DISTANT_IMAGES)}"]
    latency = [f"--latency_ms={args.latency_ms:g}", f"--connections={args.connections}"]
    distant = f"at {args.latency_ms:g} ms, {args.connections} connections"
    found = {"local": [], distant: []}
    for _ in range(args.runs):
        found["local"].append(run_alone("local files", local))
        found[distant].append(run_alone("distant files", local + latency))
    rows = [
        row(f"{name}: {key}", unit, [run[key] for run in runs])
        for key, unit in (("images_per_sec", "images/s"), ("peak_rss_mib", "MiB"))
        for name, runs in found.items()
    ]
    requests = [run["images_per_request"] for run in found[distant]]
    rows.append(row(f"{distant}: images per request", "images", requests))
    ratio = rows[1]["median"] / rows[0]["median"]
    rows.append(row(f"{distant} / local: images_per_sec", "ratio", [ratio]))
    return rows


def against_rows(commands: dict[str, list[str]], args) -> list[dict]:
    """Both pipelines in alternating runs (A B A B), each in a fresh process, and the ratios of the
    medians.
    """
    found: dict[str, list[dict]] = {name: [] for name in commands}
    for _ in range(args.runs):
        for name, command in commands.items():
            found[name].append(run_alone(name, command))
    units = dict(
        images_per_sec="images/s",
        core_ms_per_image="core-ms/image",
        peak_rss_mib="MiB",
        bytes_per_image_to_device="bytes",
    )
    rows = []
    for key, unit in units.items():
        for name, runs in found.items():
            rows.append(row(f"{name}: {key}", unit, [run[key] for run in runs]))
    medians = {r["name"]: r["median"] for r in rows}
    for key in ("core_ms_per_image", "peak_rss_mib", "bytes_per_image_to_device"):
        ratio = medians[f"ours: {key}"] / medians[f"{args.against}: {key}"]
        rows.append(row(f"ours / {args.against}: {key}", "ratio", [ratio]))
    return rows


def run(config, args):
    """All rows: `name`, `unit`, `median`, `runs`."""
    if config.data.batch_size > args.images:
        raise UserError(
            f"--images={args.images} is less than a batch of {config.data.batch_size}: give more"
        )
    if not 0 <= args.latency_ms <= 1e4 or args.connections < 1:
        raise UserError(
            f"--latency_ms={args.latency_ms} must be 0 to 10000, and --connections="
            f"{args.connections} above 0: fix them"
        )
    if args.runs < 1 or not 0 < args.mfu <= 1:  # a NaN is not above 0
        raise UserError(
            f"--runs={args.runs} must be above 0, and --mfu={args.mfu} above 0 and at most 1: "
            "fix them"
        )
    if not config.image_size:
        raise UserError(
            "config key image_size=0 is for evaluate only: set that of training, such as 224"
        )
    pod = chips_of(args.topology) if args.topology else None
    counts = threads.counts_of(args)
    contenders = commands(config, args) if args.against else None
    store = None
    if args.alone and args.latency_ms:
        store = simulated_store.simulate(args.latency_ms / 1e3, args.connections)
    source = sources.open_training(config.data, config.user, configs.uses_labels(config))
    facts = catalog.found(config, source)
    host = pipeline.train_pipeline(config, source, np.arange(config.data.batch_size), 2**31)
    if store:
        return at_distance(config, host, store, args)
    if args.alone:
        return alone(config, host, args)
    if args.latency_ms:
        return distance_rows(args)
    if counts:
        return threads.rows(config, host, counts, args)
    rows = [*host_rows(config, host, args), row("peak memory of the host", "MiB", [peak_mib()])]
    rows += device_rows(config, host, args)
    if pod:
        medians = {(r["name"], r["unit"]): r["median"] for r in rows}
        core_ms = medians["host: all", "core-ms/image"]
        rows += pod_rows(config, facts, core_ms, *pod, args)
    if contenders:
        rows += against_rows(contenders, args)
    return rows
