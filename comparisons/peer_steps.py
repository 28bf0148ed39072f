"""One implementation's training step and inference on random images, in a process of its own,
started by `peers`.

It reads commands, one per line (`train COUNT`, `infer COUNT`, `end`), and answers each with a line
of JSON on the standard output. It must import without JAX to measure timm, and without our package
to measure the others.
"""

import json
import os
import pathlib
import re
import resource
import sys
import time
from unittest import mock

import numpy as np

# Image side, patch side, width, depth, MLP width, heads.
MODELS = {
    "32px/4": (32, 4, 192, 6, 768, 3),
    "Ti/16": (224, 16, 192, 12, 768, 3),
    "S/16": (224, 16, 384, 12, 1536, 6),
    "B/16": (224, 16, 768, 12, 3072, 12),
    "L/16": (224, 16, 1024, 24, 4096, 16),
    "H/14": (224, 14, 1280, 32, 5120, 16),
}
CLASSES = 1000
CONFIG = pathlib.Path(__file__).parent.parent / "configs/step.py"


def numbers(model: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalised images [batch, H, W, 3] and one-hot labels [batch, classes]."""
    rng = np.random.default_rng(0)
    side = MODELS[model][0]
    label = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, batch)]
    return rng.uniform(-1, 1, (batch, side, side, 3)).astype(np.float32), label


def variant(model: str) -> str:
    return "Ti/4" if model == "32px/4" else model


def vit_jax(model: str, batch: int, dtype: str, path: str, options: list[str]):
    """The whole step of this framework: uint8 images, augmentation, clipping, Adam, metrics."""
    import jax

    from vit_jax import config as configs
    from vit_jax.benchmark import step
    from vit_jax.distributed import runtime
    from vit_jax.train import loop
    from vit_jax.train import state as states
    from vit_jax.train.experiment import Experiment

    runtime.keep_programs()
    runtime.keep_memory()
    side, _, _, depth, _, _ = MODELS[model]
    settings = [f"model.dtype={dtype}", f"image_size={side}", f"model.depth={depth}"]
    settings += [f"data.batch_size={batch}", *options]
    overrides = [f"--config.{setting}" for setting in settings]
    config = configs.load(f"{CONFIG}:{variant(model)}", overrides)
    job = Experiment.on_devices(config)
    jax.set_mesh(job.mesh)
    compiling = loop.compile_meanwhile(job)
    state = states.fresh_state(job)
    train_step, _ = compiling.result()
    jax.block_until_ready(state)
    runtime.release_memory()
    images = step.random_batch(job.abstract_batch, CLASSES)

    @jax.jit
    def apply(params, image):
        return job.model.apply({"params": params}, job.model.normalize(image))

    def train():
        nonlocal state
        state, metrics = train_step(state, images)
        return metrics["train/loss"]

    def infer():
        return apply(state.params, images["image"])

    return train, infer, jax.block_until_ready, job.model.flops


def big_vision(model: str, batch: int, dtype: str, path: str, options: list[str]):
    """Its model and optimizer code, with the loss, gradient and norms of its train.py."""
    sys.path.insert(0, path)
    import jax
    import jax.numpy as jnp
    import optax
    from big_vision import optax as bv_optax
    from big_vision import utils
    from big_vision.models import vit
    from ml_collections import ConfigDict

    depth = MODELS[model][3]
    fields = dict(pool_type="gap", posemb="sincos2d", dtype_mm=dtype, depth=depth)
    net = vit.Model(CLASSES, variant=variant(model), **fields)
    image, label = map(jnp.asarray, numbers(model, batch))
    config = ConfigDict(dict(lr=1e-3, wd=1e-4, grad_clip_norm=1.0, total_steps=1000))
    config.update(optax_name="scale_by_adam", optax=dict(mu_dtype="bfloat16"))
    config.update(schedule=dict(warmup_steps=100, decay_type="cosine"))
    params = jax.jit(lambda key: net.init(key, image[:1])["params"])(jax.random.key(0))
    tx, _ = bv_optax.make(config, params, sched_kw=dict(total_steps=1000, batch_size=batch))
    state = dict(params=params, opt=jax.jit(tx.init)(params))

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))

    def update(state, image, label):
        def loss(params):
            logits, _ = net.apply({"params": params}, image, train=True)
            return utils.softmax_xent(logits=logits, labels=label)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        norms = [norm(tree) for tree in (grads, params, updates)]
        return dict(params=params, opt=opt), (value, norms)

    update = jax.jit(update, donate_argnums=0)
    infer = jax.jit(lambda params, image: net.apply({"params": params}, image)[0])

    def train():
        nonlocal state
        state, (value, _) = update(state, image, label)
        return value

    return train, lambda: infer(state["params"], image), jax.block_until_ready, None


def vision_transformer(model: str, batch: int, dtype: str, path: str, options: list[str]):
    """Its model and its own update function, which is a pmap; it computes in float32."""
    sys.path.insert(0, path)
    # Its train.py imports these, with dependencies on text packages, but a step never uses them.
    for name in ("checkpoint", "input_pipeline", "models"):
        sys.modules[f"vit_jax.{name}"] = mock.MagicMock()
    import flax
    import jax
    import jax.numpy as jnp
    import optax
    from ml_collections import ConfigDict

    from vit_jax import models_vit
    from vit_jax import train as vt_train

    _, patch, width, depth, mlp, heads = MODELS[model]
    transformer = dict(num_layers=depth, mlp_dim=mlp, num_heads=heads)
    transformer |= dict(dropout_rate=0.0, attention_dropout_rate=0.0)
    patches = ConfigDict(dict(size=(patch, patch)))
    fields = dict(patches=patches, transformer=transformer, hidden_size=width, classifier="token")
    net = models_vit.VisionTransformer(num_classes=CLASSES, **fields)
    image, label = (jnp.asarray(x)[None] for x in numbers(model, batch))
    init = jax.jit(lambda key: net.init(key, image[0, :1], train=False)["params"])
    params = init(jax.random.key(0))
    sgd = optax.sgd(1e-3, momentum=0.9, accumulator_dtype="bfloat16")
    tx = optax.chain(optax.clip_by_global_norm(1.0), sgd)
    update = vt_train.make_update_fn(apply_fn=net.apply, accum_steps=1, tx=tx)
    infer = jax.jit(lambda params, image: net.apply({"params": params}, image, train=False))
    replicated, opt = flax.jax_utils.replicate((params, tx.init(params)))
    key = jax.random.split(jax.random.key(0), 1)

    def train():
        nonlocal replicated, opt, key
        images = dict(image=image, label=label)
        replicated, opt, value, key = update(replicated, opt, images, key)
        return value

    return train, lambda: infer(params, image[0]), jax.block_until_ready, None


def timm(model: str, batch: int, dtype: str, path: str, options: list[str]):
    """timm's VisionTransformer with AdamW and clipping; bfloat16 by autocast, `compile` by
    torch.compile.
    """
    import torch
    from timm.models.vision_transformer import VisionTransformer

    side, patch, width, depth, mlp, heads = MODELS[model]
    fields = dict(img_size=side, patch_size=patch, embed_dim=width, depth=depth, num_heads=heads)
    fields |= dict(mlp_ratio=mlp / width, class_token=False, global_pool="avg")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    net = VisionTransformer(**fields, num_classes=CLASSES).to(device)
    image, label = numbers(model, batch)
    image = torch.from_numpy(image.transpose(0, 3, 1, 2).copy()).to(device)
    label = torch.from_numpy(label.argmax(1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    cast = torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")
    run = torch.compile(net) if "compile" in options else net

    def train():
        with cast:
            value = torch.nn.functional.cross_entropy(run(image), label)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return value

    def infer():
        with torch.inference_mode(), cast:
            return run(image)

    def wait(value):
        value.detach().float().sum().item()

    return train, infer, wait, None


IMPLEMENTATIONS = dict(
    vit_jax=vit_jax, big_vision=big_vision, vision_transformer=vision_transformer, timm=timm
)


def timed(call, wait, count: int) -> dict:
    """Mean wall and core seconds of `count` calls."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    for _ in range(count):
        result = call()
    wait(result)
    wall = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    return dict(wall=wall / count, cpu=cpu / count)


def peak_mib() -> float:
    """Peak resident memory so far."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def device() -> tuple[str, float]:
    """Name of the accelerator, and the peak MiB of its memory that arrays took so far; ("", 0) on
    CPUs.
    """
    if "torch" in sys.modules:
        import torch

        if not torch.cuda.is_available():
            return "", 0.0
        return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() / 2**20
    import jax

    found = jax.local_devices()[0]
    stats = found.memory_stats() or {}
    name = "" if found.platform == "cpu" else found.device_kind
    return name, stats.get("peak_bytes_in_use", 0) / 2**20


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print on the standard output, which is for answers

    def answer(**facts) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    peer, model, batch, dtype, path, *options = sys.argv[1:]
    train, infer, wait, flops = IMPLEMENTATIONS[peer](model, int(batch), dtype, path, options)
    wait(train())
    seconds = time.time() - float(os.environ["BEGUN"])
    name, device_mib = device()  # of training alone
    answer(first_step=seconds, flops=flops, device=name, device_mib=device_mib)
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        if what == "end":
            return
        answer(**timed(dict(train=train, infer=infer)[what], wait, int(count)), peak_mib=peak_mib())


if __name__ == "__main__":
    main()
