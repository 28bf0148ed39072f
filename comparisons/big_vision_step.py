"""Compares the TPU compiler's estimates of our training step and big_vision's on the same pods.

    python -m comparisons.big_vision_step --big_vision=PATH [--only=L/16] [--json=FILE]

PATH is a checkout, the folder that contains the package `big_vision`; it needs libtpu and `pip
install einops overrides`. big_vision's step uses its own model and optimizer code, with the loss,
gradient and norms that its train.py computes. Its layers are unrolled, without remat, and
replicated over the chips: the fastest of its settings by the compiler's cycles. Each of the two
programs of a case compiles in one to four minutes.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys

from vit_jax import config as configs
from vit_jax.plan import topology

topology.prepare_environment()

import jax  # noqa: E402 - reads the environment
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from vit_jax.distributed import hardware  # noqa: E402
from vit_jax.models import losses  # noqa: E402
from vit_jax.models.ops import short_attention  # noqa: E402
from vit_jax.plan import collectives, compilation, figures, hlo  # noqa: E402
from vit_jax.train.experiment import total_bytes  # noqa: E402

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
COMMON = ["model.pool=gap", "model.posemb=sincos2d", "model.pre_logits=False", "model.dropout=0"]
COMMON += ["optim.wd=1e-4", "optim.wd_times_lr=False", "optim.grad_clip_norm=1"]
COMMON += ["loss=sigmoid_xent"]
# Part of the step -> what the name of an operation contains, in both programs; the first that does.
# A fusion has the name of one of its operations.
PARTS = {
    "MLP": "MlpBlock",
    "projections": r"MultiHead.*(query|key|value|out\b|project)",
    "attention": "MultiHead|" + short_attention.NAME,
    "LayerNorm": "LayerNorm|encoder_norm",
    "embedding, head and loss": "jvp",
    "optimizer, norms and the rest": "",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program; `settings` are ours, in addition to `COMMON`."""

    variant: str
    topology: str
    batch_size: int
    whole: bool  # with the optimizer, or forward and backward pass only
    settings: str = ""
    recipe: str = ""  # a recipe of ours as it is, in place of `COMMON` and settings

    @property
    def name(self) -> str:
        if self.recipe:
            return f"{self.recipe} as shipped"
        what = "step" if self.whole else "forward and backward"
        return (
            f"{self.variant} {what}, {self.batch_size} on {self.topology} {self.settings}".strip()
        )


CASES = [
    Case("L/16", "v5e:1x1", 64, False),
    Case("B/16", "v5e:1x1", 128, False),
    Case("L/16", "v5e:8x8", 4096, True),
    Case("L/16", "v5e:8x8", 4096, True, "mesh.data=4 mesh.fsdp=16"),
    Case("L/16", "v5e:8x8", 4096, True, recipe="pods.py:L/16,v5e"),
    Case("L/16", "v6e:4x8", 4096, True),
    Case("L/16", "v6e:4x8", 4096, True, recipe="pods.py:L/16,v6e"),
    Case("B/16", "v5e:4x8", 4096, True),
    Case("B/16", "v5e:4x8", 4096, True, recipe="pods.py:B/16,v5e"),
    Case("H/14", "v5e:16x16", 4096, True, "mesh.data=16 mesh.fsdp=16"),
    Case("H/14", "v5e:16x16", 4096, True, recipe="pods.py:H/14,v5e"),
]


def part_of(name: str) -> str:
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def mcycles_by_part(program: hlo.Program, chip, kernels_ms: float) -> dict[str, float]:
    """The compiler's cycles of each of `PARTS`, with those of attention's kernels."""
    found = dict.fromkeys(PARTS, 0.0)
    found["attention"] = kernels_ms * chip.clock / 1e9
    for _, instruction, times in program.walk():
        name = re.search('op_name="([^"]*)"', instruction.rest)
        part = part_of(name[1]) if name else "optimizer, norms and the rest"
        found[part] += times * instruction.cycles / 1e6
    return found


def facts(program: hlo.Program, size: float, mesh, chip, job=None) -> dict:
    """Mcycles, memory and communication of a compiled program; `job` is the experiment if the
    program is ours, whose kernels are counted.
    """
    roofline, compute = figures.compute_ms(program, chip)
    kernels = 0.0
    if job:
        kernels = figures.kernel_ms(program, job)[1]
    compute += kernels
    sent = collectives.collectives(program, mesh, chip)
    return dict(
        mcycles=compute * chip.clock / 1e9,
        of_kernels=kernels * chip.clock / 1e9,
        compute_ms=compute,
        roofline_ms=roofline,
        communication_ms=1e3 * sum(c.seconds for c in sent),
        waiting_ms=1e3 * sum(c.seconds for c in sent if not c.overlapped),
        hbm_gib=size / 2**30,
        by_part=mcycles_by_part(program, chip, kernels),
    )


def program_of(compiled) -> tuple[hlo.Program, float]:
    return hlo.Program(compiled.as_text()), total_bytes(compiled)


def forward_backward(apply, loss: str):
    def mean_loss(params, image, label):
        return losses.LOSSES[loss](apply(params, image), label).mean()

    return jax.value_and_grad(mean_loss)


def images(mesh, batch_size: int, size: int = 224):
    """Normalised images and labels [batch, 1000] as they come from the host in big_vision."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shapes = (batch_size, size, size, 3), (batch_size, 1000)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in shapes]


def our_config(case: Case):
    if case.recipe:
        return configs.load(f"{CONFIGS}/{case.recipe}")
    overrides = [f"--config.{text}" for text in (*COMMON, *case.settings.split())]
    overrides += [f"--config.data.batch_size={case.batch_size}"]
    return configs.load(f"{CONFIGS}/pretrain.py:{case.variant},imagenet2012", overrides)


def ours(case: Case) -> dict:
    config = our_config(case)
    job = compilation.on_topology(config, case.topology, 1)
    if case.whole:
        found = compilation.compile_step(job)
        return facts(found.program, found.total_bytes, job.mesh, job.chip, job)

    def apply(params, image):
        return job.model.apply({"params": params}, image, train=True)

    with jax.set_mesh(job.mesh):
        options = hardware.compiler_options(job.mesh)
        step = jax.jit(forward_backward(apply, config.loss), compiler_options=options)
        arguments = images(job.mesh, case.batch_size)
        compiled = step.lower(job.abstract_state.params, *arguments).compile()
    return facts(*program_of(compiled), job.mesh, job.chip, job)


def optimizer(params, batch_size: int):
    """big_vision's, with its own schedule."""
    from big_vision import optax as bv_optax
    from ml_collections import ConfigDict

    steps = 100_000
    config = ConfigDict(dict(lr=1e-3, wd=1e-4, grad_clip_norm=1.0, total_steps=steps))
    config.update(optax_name="scale_by_adam", optax=dict(mu_dtype="bfloat16"))
    config.update(schedule=dict(warmup_steps=10_000, decay_type="cosine"))
    sched_kw = dict(global_batch_size=batch_size, total_steps=steps)
    tx, _ = bv_optax.make(config, params, sched_kw=sched_kw)
    return tx


def peers(case: Case) -> dict:
    from big_vision.models import vit

    chip, _ = topology.parse(case.topology)
    devices = topology.devices(case.topology)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=types, devices=devices)
    fields = dict(pool_type="gap", posemb="sincos2d", dtype_mm="bfloat16")
    model = vit.Model(1000, variant=case.variant, **fields)
    image = jnp.zeros((1, 224, 224, 3))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), image)["params"])
    tx = optimizer(params, case.batch_size)
    state = dict(params=params, opt=jax.eval_shape(tx.init, params))
    replicated = NamedSharding(mesh, PartitionSpec())

    def replicate(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    state = jax.tree.map(replicate, state)

    def apply(params, image):
        return model.apply({"params": params}, image, train=True)[0]

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))

    gradient = forward_backward(apply, "sigmoid_xent")

    def update(state, image, label):
        params = state["params"]
        loss, grads = gradient(params, image, label)
        updates, opt = tx.update(grads, state["opt"], params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        norms = dict(g=norm(grads), p=norm(params), u=norm(updates))
        return dict(params=params, opt=opt), dict(loss=loss, **norms)

    with jax.set_mesh(mesh):
        arguments = images(mesh, case.batch_size)
        if case.whole:
            lowered = jax.jit(update, donate_argnums=0).lower(state, *arguments)
        else:
            lowered = jax.jit(gradient).lower(state["params"], *arguments)
        compiled = lowered.compile()
    return facts(*program_of(compiled), mesh, chip)


def rounded(found: dict) -> dict:
    return jax.tree.map(lambda value: round(value, 3), found)


def show(row: dict) -> None:
    us, them = rounded(row["ours"]), rounded(row["big_vision"])
    ratio = row["ours"]["mcycles"] / row["big_vision"]["mcycles"]
    print(f"{row['name']}: {us['mcycles']:.1f} / {them['mcycles']:.1f} = {ratio:.3f}")
    print(f"  {us}\n  {them}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--big_vision", required=True, metavar="PATH")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sys.path.insert(0, args.big_vision)
    rows = []
    peer = {}
    for case in CASES:
        if args.only not in case.name:
            continue
        key = dataclasses.replace(case, settings="", recipe="")
        if key not in peer:
            peer[key] = peers(case)
        rows.append(dict(name=case.name, ours=ours(case), big_vision=peer[key]))
        show(rows[-1])
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
