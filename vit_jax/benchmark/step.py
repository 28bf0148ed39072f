"""`vit_jax.benchmark step`: speed, memory and compilation of the training step and of inference,
without data.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.benchmark.rows import row
from vit_jax.distributed import hardware, runtime
from vit_jax.errors import UserError
from vit_jax.plan import compilation
from vit_jax.train import experiment
from vit_jax.train import state as states
from vit_jax.train.timer import timed

WARMUP = 2  # calls that are not counted


def parse_models(text: str, config) -> list[tuple[str, int]]:
    """(variant, images per step) of "Ti/16:16,S/16:8"; those of the config where nothing is said.

    Raises:
      UserError: a part is no such pair.
    """
    if not text:
        return [(config.model.variant, config.data.batch_size)]
    found = []
    for part in text.split(","):
        variant, _, count = part.rpartition(":")
        if not variant or not count.isdecimal() or int(count) < 1:
            raise UserError(f"--models={text}: {part!r} is not VARIANT:IMAGES, as Ti/16:16")
        found.append((variant, int(count)))
    return found


def seconds_per_call(call: Callable[[], object], count: int, runs: int) -> list[float]:
    """Wall seconds of one of `count` calls that are dispatched in a row, for each of `runs` rounds."""
    jax.block_until_ready([call() for _ in range(WARMUP)])
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(count)][-1])
        found.append((time.perf_counter() - start) / count)
    return found


def product_flops(runs: int) -> list[float]:
    """FLOP/s of one device in a large product of bfloat16 matrices with float32 sums: what its
    matrix units give.
    """
    side = hardware.product_side()
    x, y = (
        jax.random.normal(key, (side, side), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    return [2 * side**3 / seconds for seconds in seconds_per_call(lambda: multiply(x, y), 10, runs)]


def random_batch(abstract: dict, num_classes: int) -> dict:
    """Pixels and labels by chance, in the place of a batch of training."""
    rng = np.random.default_rng(0)
    highest = dict(image=256, label=num_classes, mask=1, seed=2**31 - 1)

    def draw(name, x):
        values = np.ones(x.shape) if name == "mask" else rng.integers(0, highest[name], x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return {name: draw(name, x) for name, x in abstract.items()}


def measure(config, args, product: float) -> list[dict]:
    """Rows of one model."""
    job = experiment.on_devices(config, None, jax.devices())
    name, size = f"{config.model.variant}, {config.data.batch_size} images", config.data.batch_size
    with jax.set_mesh(job.mesh):
        lowered, tracing = timed(job.train_step.lower, job.state, job.batch)
        compiled, compiling = timed(lowered.compile)
        state = states.fresh_state(config, job.model, job.optimizer, job.state)
        batch = random_batch(job.batch, job.model.num_classes)

        def update():
            nonlocal state
            state, metrics = compiled(state, batch)
            return metrics

        training = seconds_per_call(update, args.steps, args.runs)
        infer = jax.jit(
            lambda params, image: job.model.apply({"params": params}, job.model.normalize(image))
        )
        inference = seconds_per_call(
            lambda: infer(state.params, batch["image"]), args.steps, args.runs
        )
    flops = size * job.model.flops / job.num_chips
    peaks = {
        "the data sheet's peak": hardware.peak_flops(jax.devices()[0].device_kind),
        "the peak in products": product,
    }
    found = [
        ("training", "images/s", [size / seconds for seconds in training]),
        *(
            (f"of {k}", "MFU", [3 * flops / s / peak for s in training])
            for k, peak in peaks.items()
            if peak
        ),
        ("inference", "images/s", [size / seconds for seconds in inference]),
        ("memory of the step, per device", "MiB", [compilation.total_bytes(compiled) / 2**20]),
        ("tracing", "s", [tracing]),
        ("compilation", "s", [compiling]),
    ]
    return [row(f"{name}: {what}", unit, runs) for what, unit, runs in found]


def run(config, args, overrides) -> list[dict]:
    """Rows of every model.

    Raises:
      UserError: an argument is wrong.
    """
    if args.steps < 1:
        raise UserError(f"--steps={args.steps} is too few: give 1 or more")
    wanted = parse_models(args.models, config)
    jax.config.update("jax_enable_compilation_cache", False)  # what is told is compiled
    runtime.keep_memory()
    product = product_flops(args.runs)
    rows = [
        row(
            "product of bfloat16 matrices, one device",
            "TFLOP/s",
            [flops / 1e12 for flops in product],
        )
    ]
    for variant, batch_size in wanted:
        with config.unlocked():
            config.model.variant, config.data.batch_size = variant, batch_size
        rows += measure(config, args, statistics.median(product))
    return rows
