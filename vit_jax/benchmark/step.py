"""`vit_jax.benchmark step`: speed, memory and compilation time of the training step and of
inference, on random images.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as configs
from vit_jax.benchmark.rows import row
from vit_jax.distributed import hardware, runtime
from vit_jax.errors import UserError
from vit_jax.train import state as states
from vit_jax.train.experiment import Experiment, total_bytes
from vit_jax.train.timer import timed

WARMUP = 2  # calls that are not counted


def parse_models(text: str, config) -> list[tuple[str, int]]:
    """(variant, images per step) of "Ti/16:16,S/16:8"; those of the config if the text is empty."""
    if not text:
        return [(config.model.variant, config.data.batch_size)]
    found = []
    for part in text.split(","):
        variant, _, count = part.rpartition(":")
        if not variant or not count.isdecimal() or int(count) < 1:
            raise UserError(f"--models={text}: {part!r} is not VARIANT:IMAGES, such as Ti/16:16")
        found.append((variant, int(count)))
    return found


def seconds_per_call(call: Callable[[], object], count: int, runs: int) -> list[float]:
    """Mean wall seconds of `count` calls dispatched in a row, for each of `runs` rounds."""
    jax.block_until_ready([call() for _ in range(WARMUP)])
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(count)][-1])
        found.append((time.perf_counter() - start) / count)
    return found


def product_flops(runs: int) -> list[float]:
    """FLOP/s of one device in a large product of bfloat16 matrices with float32 sums: the peak that
    its matrix units reach in practice.
    """
    side = hardware.product_side()
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    timings = seconds_per_call(lambda: multiply(x, y), 10, runs)
    return [2 * side**3 / seconds for seconds in timings]


def random_batch(abstract: dict, num_classes: int) -> dict:
    """Random pixels and labels in the shapes of a training batch."""
    rng = np.random.default_rng(0)
    highest = dict(image=256, local=256, label=max(num_classes, 1), seed=2**31 - 1)

    def draw(name, x):
        values = np.ones(x.shape) if name == "mask" else rng.integers(0, highest[name], x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return {name: draw(name, x) for name, x in abstract.items()}


def measure(config, args, product: float) -> list[dict]:
    """Rows of one model."""
    experiment = Experiment.on_devices(config)
    size = config.data.batch_size
    name = f"{config.model.variant}, {size} images"
    with jax.set_mesh(experiment.mesh):
        lowered, tracing = timed(
            experiment.train_step.lower, experiment.abstract_state, experiment.abstract_batch
        )
        compiled, compiling = timed(lowered.compile)
        state = states.fresh_state(experiment)
        batch = random_batch(experiment.abstract_batch, experiment.model.num_classes)

        def update():
            nonlocal state
            state, metrics = compiled(state, batch)
            return metrics

        training = seconds_per_call(update, args.steps, args.runs)

        @jax.jit
        def infer(params, image):
            params = experiment.objective.of_model(params)
            return experiment.model.apply({"params": params}, experiment.model.normalize(image))

        image = batch["image"]
        if configs.has_views(config):
            image = image[:, 0]
        call = lambda: infer(state.params, image)  # noqa: E731
        inference = seconds_per_call(call, args.steps, args.runs)
    flops = size * experiment.objective.train_flops / experiment.num_chips
    peaks = {
        "the data sheet's peak": hardware.peak_flops(jax.devices()[0].device_kind),
        "the peak in products": product,
    }
    found = [("training", "images/s", [size / seconds for seconds in training])]
    for peak_name, peak in peaks.items():
        if peak:
            found.append((f"of {peak_name}", "MFU", [flops / s / peak for s in training]))
    found += [
        ("inference", "images/s", [size / seconds for seconds in inference]),
        ("memory of the step, per device", "MiB", [total_bytes(compiled) / 2**20]),
        ("tracing", "s", [tracing]),
        ("compilation", "s", [compiling]),
    ]
    return [row(f"{name}: {what}", unit, runs) for what, unit, runs in found]


def run(config, args) -> list[dict]:
    """Rows of every model."""
    if args.steps < 1:
        raise UserError(f"--steps={args.steps} is too few: give 1 or more")
    models = parse_models(args.models, config)
    jax.config.update("jax_enable_compilation_cache", False)  # to measure compilation, not loading
    runtime.keep_memory()
    product = product_flops(args.runs)
    teraflops = [flops / 1e12 for flops in product]
    rows = [row("product of bfloat16 matrices, one device", "TFLOP/s", teraflops)]
    for variant, batch_size in models:
        with config.unlocked():
            config.model.variant = variant
            config.data.batch_size = batch_size
        rows += measure(config, args, statistics.median(product))
    return rows
