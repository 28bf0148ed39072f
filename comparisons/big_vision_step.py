"""Compiles the training steps of ours and of big_vision for the same TPU pods, and compares what
the compiler says.

    python -m benchmarks.big_vision_step --big_vision=PATH [--only=L/16] [--json=FILE]

PATH is the folder that holds the package `big_vision`; it needs libtpu and `pip install einops
overrides`. big_vision's step is its own model and its own optimizer code below the loss, gradient
and norms that its train.py computes, with its layers unrolled, without remat, replicated over the
chips: the fastest of its settings by the compiler's cycles. A case takes one to four minutes for
each.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from vit_jax import config as configs
from vit_jax.plan import topology

topology.prepare_environment()

import jax  # noqa: E402 - reads the environment
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from vit_jax.models import losses  # noqa: E402
from vit_jax.plan import collectives, compilation, figures, hlo  # noqa: E402

CONFIG = pathlib.Path(__file__).parent.parent / "configs/pretrain.py"
COMMON = [
    "model.pool=gap",
    "model.posemb=sincos2d",
    "model.pre_logits=False",
    "model.dropout=0",
    "optim.wd=1e-4",
]
COMMON += ["optim.wd_times_lr=False", "optim.grad_clip_norm=1", "loss=sigmoid_xent"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `settings` are ours, beyond `COMMON`."""

    variant: str
    topology: str
    batch_size: int
    whole: bool  # with the optimizer, else forward and backward alone
    settings: str = ""

    @property
    def name(self) -> str:
        what = "step" if self.whole else "forward and backward"
        return f"{self.variant} {what}, {self.batch_size} on {self.topology}, {self.settings or 'float32 softmax'}"


BF16 = "model.softmax_dtype=bfloat16"
CASES = [
    Case("L/16", "v5e:1x1", 64, False, BF16),
    Case("L/16", "v5e:1x1", 64, False),
    Case("B/16", "v5e:1x1", 128, False, BF16),
    Case("B/16", "v5e:1x1", 128, False),
    Case("L/16", "v5e:8x8", 4096, True, f"{BF16} mesh.data=4 mesh.fsdp=16"),
    Case("L/16", "v5e:8x8", 4096, True, "mesh.data=4 mesh.fsdp=16"),
    Case("B/16", "v5e:4x8", 4096, True),
    Case("H/14", "v5e:16x16", 4096, True, f"{BF16} mesh.data=16 mesh.fsdp=16"),
]


def facts(compiled, arguments, mesh, chip) -> dict:
    """Mcycles, memory and communication of a compiled program."""
    program, memory = hlo.Program(compiled.as_text()), compiled.memory_analysis()
    roofline, compute = figures.compute_ms(program, chip)
    sent = collectives.collectives(program, mesh, chip)
    return dict(
        mcycles=compute * chip.clock / 1e9,
        compute_ms=compute,
        roofline_ms=roofline,
        communication_ms=1e3 * sum(c.seconds for c in sent),
        waiting_ms=1e3 * sum(c.seconds for c in sent if not c.overlapped),
        state_gib=compilation.shard_bytes(arguments) / 2**30,
        temporary_gib=memory.temp_size_in_bytes / 2**30,
    )


def forward_backward(apply, loss: str):
    def run(params, image, label):
        return jax.value_and_grad(lambda p: losses.LOSSES[loss](apply(p, image), label).mean())(
            params
        )

    return jax.jit(run)


def images(mesh, batch_size: int, size: int = 224):
    """Normalised images and labels [batch, 1000] as they come from the host in big_vision."""
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shapes = (batch_size, size, size, 3), (batch_size, 1000)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]


def ours(case: Case) -> dict:
    overrides = [f"--config.{text}" for text in (*COMMON, *case.settings.split())]
    overrides += [f"--config.data.batch_size={case.batch_size}"]
    config = configs.load(f"{CONFIG}:{case.variant},imagenet2012", overrides)
    job = compilation.make_job(config, case.topology, 1)
    with jax.set_mesh(job.mesh):
        if case.whole:
            compiled = job.train_step.lower(job.state, job.batch).compile()
        else:
            step = forward_backward(
                lambda p, x: job.model.apply({"params": p}, x, train=True), config.loss
            )
            compiled = step.lower(job.state.params, *images(job.mesh, case.batch_size)).compile()
    return facts(compiled, job.state, job.mesh, job.chip)


def peers(case: Case) -> dict:
    from big_vision import optax as bv_optax
    from big_vision.models import vit
    from ml_collections import ConfigDict

    chip, _ = topology.parse(case.topology)
    devices = topology.devices(case.topology)
    mesh = jax.make_mesh(
        (len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    model = vit.Model(
        1000, variant=case.variant, pool_type="gap", posemb="sincos2d", dtype_mm="bfloat16"
    )
    apply = lambda p, x: model.apply({"params": p}, x, train=True)[0]  # noqa: E731
    config = ConfigDict(
        dict(lr=1e-3, wd=1e-4, grad_clip_norm=1.0, optax_name="scale_by_adam", total_steps=100_000)
    )
    config.update(
        optax=dict(mu_dtype="bfloat16"), schedule=dict(warmup_steps=10_000, decay_type="cosine")
    )
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]
    )
    tx, _ = bv_optax.make(
        config, params, sched_kw=dict(global_batch_size=case.batch_size, total_steps=100_000)
    )
    state = dict(params=params, opt=jax.eval_shape(tx.init, params))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))

    def update(state, image, label):
        params = state["params"]
        loss, grads = jax.value_and_grad(
            lambda p: losses.LOSSES["sigmoid_xent"](apply(p, image), label).mean()
        )(params)
        updates, opt = tx.update(grads, state["opt"], params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return dict(params=params, opt=opt), dict(
            loss=loss, **{k: norm(t) for k, t in zip("gpu", (grads, params, updates), strict=True)}
        )

    with jax.set_mesh(mesh):
        arguments = images(mesh, case.batch_size)
        if case.whole:
            compiled = jax.jit(update, donate_argnums=0).lower(state, *arguments).compile()
        else:
            compiled = (
                forward_backward(apply, "sigmoid_xent").lower(state["params"], *arguments).compile()
            )
    return facts(compiled, state, mesh, chip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--big_vision", required=True, metavar="PATH")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sys.path.insert(0, args.big_vision)
    rows, peer = [], {}
    for case in CASES:
        if args.only not in case.name:
            continue
        key = dataclasses.replace(case, settings="")
        peer[key] = peer.get(key) or peers(case)
        rows.append(dict(name=case.name, ours=ours(case), big_vision=peer[key]))
        us, them = rows[-1]["ours"], peer[key]
        print(
            f"{case.name}: {us['mcycles']:.1f} / {them['mcycles']:.1f} = "
            f"{us['mcycles'] / them['mcycles']:.3f}",
            flush=True,
        )
        print(
            f"  { ({k: round(v, 3) for k, v in us.items()}) }\n  "
            f"{ ({k: round(v, 3) for k, v in them.items()}) }",
            flush=True,
        )
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
