"""The page of pod recipes: compiles each and writes a table.

python -m vit_jax.plan.pods_page --out=docs/pods.md [--only=L/16,v5e --only=...] [--jobs=2]
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile

from vit_jax import cli, errors
from vit_jax import config as configs
from vit_jax.plan.report import UNSEEN, span

RECIPES = pathlib.Path("configs/pods.py")
HEAD = """# Pods

What the recipes of `configs/pods.py` take, as the TPU compiler says: every row was compiled by it for the whole pod,
with the very step that `vit_jax.train` runs, by `make plans`. Batch 4096, 224 pixels, ImageNet-21k, 90 epochs.

"""
COLUMNS = (
    "recipe",
    "pod",
    "chips",
    "mesh and settings",
    "HBM per chip, GiB",
    "step, ms",
    "of it communication",
)
COLUMNS += ("MFU, %", "images/s per chip", "days")


def recipes() -> list[str]:
    """Arguments of all recipes: "L/16,v5e"."""
    return [
        f"{variant},{chip}"
        for variant, pods in configs.import_file(RECIPES).PODS.items()
        for chip in pods
    ]


def plan(argument: str) -> dict:
    """Compiles one recipe in a process of its own.

    Raises:
      UserError: it could not be planned at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "plan.json"
        command = [
            sys.executable,
            "-m",
            "vit_jax.plan",
            f"--config={RECIPES}:{argument}",
            f"--json={out}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise errors.UserError(
                f"{RECIPES}:{argument} could not be planned: {last.removeprefix('error: ')}"
            )
        return json.loads(out.read_text())


def settings(argument: str) -> str:
    """What differs from plain data parallelism, in words."""
    config = configs.load(f"{RECIPES}:{argument}", [])
    words = [
        f"{axis} {size}"
        for axis, size in config.mesh.items()
        if axis not in ("data", "zero") and size > 1
    ]
    words += ["ZeRO"] if config.mesh.zero else []
    words += [f"remat {config.model.remat}"] if config.model.remat != "none" else []
    words += ["scan"] if config.model.scan else []
    words += [f"{config.accum_steps} microbatches"] if config.accum_steps > 1 else []
    return ", ".join(words) or "data parallel"


def row(argument: str, found: dict) -> tuple:
    """One line of the table."""
    head = (f"`{argument}`", found["topology"], f"{found['num_chips']}", settings(argument))
    memory = f"{found['hbm_gib']['total']:.1f} of {found['hbm_limit_gib']:.1f}"
    if not found["fits"]:
        return (*head, f"{memory}: does not fit", *[""] * 5)
    percent = {end: 100 * value for end, value in found["mfu"].items()}
    step, images = found["step_ms"], found["images_per_sec_per_chip"]
    figures = (
        span(step),
        f"{step['communication']:.0f}",
        span(percent),
        span(images),
        span(found["days"], ".1f"),
    )
    return (*head, memory, *figures)


def page(found: dict[str, dict]) -> str:
    lines = [
        COLUMNS,
        ["---"] * len(COLUMNS),
        *(row(argument, plan) for argument, plan in found.items()),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{HEAD}{table}\n\n{UNSEEN}\n"


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.plan.pods_page", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--out", metavar="FILE.md", help="write the page here")
    parser.add_argument(
        "--only", action="append", default=[], metavar="VARIANT,CHIP", help="this recipe (repeat)"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="compiles at once (default: %(default)s)"
    )
    args = parser.parse_args(argv)

    def work():
        wanted = args.only or recipes()
        if unknown := sorted(set(wanted) - set(recipes())):
            raise errors.UserError(
                f"--only={unknown[0]} is no recipe of {RECIPES}: use one of {', '.join(recipes())}"
            )
        found = {}
        with concurrent.futures.ThreadPoolExecutor(max(args.jobs, 1)) as pool:
            for argument, result in zip(wanted, pool.map(plan, wanted), strict=True):
                found[argument] = result
                verdict = "fits" if result["fits"] else "DOES NOT FIT"
                memory = f"{result['hbm_gib']['total']:.2f} of {result['hbm_limit_gib']:.2f} GiB"
                step = span(result["step_ms"], ".0f", " ms a step") if result["step_ms"] else ""
                if args.out:  # as far as it is known
                    pathlib.Path(args.out).write_text(page(found))
                print(
                    f"{argument:<14} {result['topology']:<10} {verdict}: {memory}  {step}",
                    flush=True,
                )
        if bad := [argument for argument, result in found.items() if not result["fits"]]:
            raise errors.NegativeResult(
                f"recipes that do not fit: {', '.join(bad)}: change them in {RECIPES}"
            )

    return cli.run(work, debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
