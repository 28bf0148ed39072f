"""Plans a recipe for more and more chips with as many images per chip, and draws what a step takes.

    python -m vit_jax.plan.weak_scaling --config=configs/pods.py:L/16,v5e --out=weak_scaling.md

The recipe's `topology`, of a chip whose network is a torus of two dimensions, and its batch size
decide how many images a chip has. Above 256 chips there are several pods: the mesh replicates over
them. Each plan compiles the step, in one to five minutes.
"""

import concurrent.futures
import pathlib
import sys

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.errors import UserError
from vit_jax.plan import pods_page, topology
from vit_jax.plan.report import UNSEEN
from vit_jax.report.tables import markdown

# Chips -> (shape of a pod, pods).
PODS = {
    8: ("2x4", 1),
    16: ("4x4", 1),
    32: ("4x8", 1),
    64: ("8x8", 1),
    128: ("8x16", 1),
    256: ("16x16", 1),
    512: ("16x16", 2),
    1024: ("16x16", 4),
}
COLUMNS = ("chips", "mesh", "computation, ms", "of the first")
COLUMNS += ("communication, ms", "exposed, ms", "of the step, %", "HBM per chip, GiB")


def options(location: str, chips: int) -> list[str]:
    """Arguments of a plan for `chips`; UserError if the recipe's chip is in a torus of three
    dimensions.
    """
    config = configs.load(location, [])
    chip, extents = topology.parse(config.topology)
    if chip.torus != 2:
        raise UserError(
            f"--config={location}: topology={config.topology} is a torus of {chip.torus} "
            "dimensions: use a recipe for v5e or v6e"
        )
    shape, pods = PODS[chips]
    images = config.data.batch_size // (extents[0] * extents[1])
    fsdp = min(config.mesh.fsdp, chips // pods)
    settings = {"data.batch_size": images * chips, "mesh.replica": pods, "mesh.fsdp": fsdp}
    settings["mesh.data"] = chips // pods // fsdp
    name = config.topology.partition(":")[0]
    changed = [f"--config.{key}={value}" for key, value in settings.items()]
    pod = [f"--topology={name}:{shape}", f"--num_slices={pods}"]
    return [f"--config={location}", *pod, *changed]


def exposed(step: dict[str, float]) -> float:
    """ms of communication that a step waits for, even if all that may overlap does."""
    return step["low"] - step["compute_roofline"]


def row(found: dict, first: float) -> tuple[str, ...]:
    """One line of the table; `first` is the computation of the first plan that fits, in ms."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    head = (f"{found['num_chips']:,}", mesh)
    memory = f"{found['hbm_gib']['total']:.1f}"
    step = found["step_ms"]
    if not step:
        return (*head, "does not fit", *[""] * 4, memory)
    waiting = exposed(step)
    compute = step["compute_estimate"]
    times = (f"{compute:.1f}", f"{compute / first:.3f}")
    share = f"{100 * waiting / (compute + waiting):.1f}"
    return (*head, *times, f"{step['communication']:.1f}", f"{waiting:.1f}", share, memory)


def fitting(plans: list[dict]) -> list[dict]:
    return [plan for plan in plans if plan["step_ms"]]


def draw(found: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Computation, alone and with exposed communication, against the number of chips."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for number, (location, plans) in enumerate(found.items()):
        plans = fitting(plans)
        chips = [plan["num_chips"] for plan in plans]
        compute = [plan["step_ms"]["compute_estimate"] for plan in plans]
        step = [ms + exposed(plan["step_ms"]) for ms, plan in zip(compute, plans, strict=True)]
        name = location.rpartition(":")[2]
        axes.plot(chips, compute, "o-", color=f"C{number}", label=f"{name}: computation")
        label = f"{name}: and exposed communication"
        axes.plot(chips, step, "s--", color=f"C{number}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(PODS), [f"{chips:,}" for chips in PODS])
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chips")
    axes.set_ylabel("ms per step")
    axes.legend()
    figure.savefig(path, dpi=120)


def page(found: dict[str, list[dict]], picture: str) -> str:
    parts = []
    for location, plans in found.items():
        computations = (plan["step_ms"]["compute_estimate"] for plan in fitting(plans))
        first = next(computations, 0.0)
        table = markdown(COLUMNS, (row(plan, first) for plan in plans))
        parts.append(f"`{location}`:\n\n{table}")
    parts.append(f"![Time of a step against the number of chips]({picture})")
    return "\n\n".join([*parts, UNSEEN, ""])


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.plan.weak_scaling", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--config", action="append", required=True, metavar="FILE.py:ARG", help="recipe (repeat)"
    )
    parser.add_argument(
        "--chips", type=int, action="append", choices=PODS, help="(repeat; default: all)"
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE.md", help="write tables here and a PNG beside it"
    )
    args = parser.parse_args(argv)

    def work():
        cli.check_file(args.out, "--out")
        out = pathlib.Path(args.out)
        chips = args.chips or list(PODS)
        wanted = {name: [options(name, number) for number in chips] for name in args.config}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            plans = {name: pool.map(pods_page.plan, each) for name, each in wanted.items()}
            found = {name: list(each) for name, each in plans.items()}
        draw(found, out.with_suffix(".png"))
        text = page(found, out.with_suffix(".png").name)
        out.write_text(text)
        print(text)

    return cli.run(work, debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
