"""Compiles every pod recipe and writes docs/pods.md, a page with a table of them.

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
from vit_jax.report.tables import markdown

RECIPES = pathlib.Path("configs/pods.py")
HEAD = """# Pods

Memory, time and throughput of the recipes in `configs/pods.py`. For every row the TPU compiler
compiled the step that `vit_jax.train` runs, for the whole pod (`make plans`). Batch 4096, 224
pixels, ImageNet-21k, 90 epochs.

"""
COLUMNS = ("recipe", "pod", "chips", "mesh and settings", "HBM per chip, GiB", "step, ms")
COLUMNS += ("communication, ms", "MFU, %", "images/s per chip", "days")


def recipes() -> list[str]:
    """Arguments of all recipes: "L/16,v5e"."""
    pods = configs.import_file(RECIPES).PODS
    return [f"{variant},{chip}" for variant, chips in pods.items() for chip in chips]


def plan(options: list[str]) -> dict:
    """The plan by `vit_jax.plan` with these options, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "plan.json"
        command = [sys.executable, "-m", "vit_jax.plan", *options, f"--json={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            what = " ".join(options).removeprefix("--config=")
            raise errors.UserError(f"{what} could not be planned: {last.removeprefix('error: ')}")
        return json.loads(out.read_text())


def settings(argument: str) -> str:
    """The differences from plain data parallelism, in words."""
    config = configs.load(f"{RECIPES}:{argument}", [])
    words = []
    for axis in ("replica", "fsdp", "tensor"):
        if config.mesh[axis] > 1:
            words.append(f"{axis} {config.mesh[axis]}")
    if config.mesh.zero:
        words.append("ZeRO")
    if config.model.remat != "none":
        words.append(f"remat {config.model.remat}")
    if config.model.scan:
        words.append("scan")
    if config.accum_steps > 1:
        words.append(f"{config.accum_steps} microbatches")
    return ", ".join(words) or "data parallel"


def row(argument: str, found: dict) -> tuple:
    """One line of the table."""
    head = (f"`{argument}`", found["topology"], f"{found['num_chips']}", settings(argument))
    memory = f"{found['hbm_gib']['total']:.1f} of {found['hbm_limit_gib']:.1f}"
    if not found["fits"]:
        return (*head, f"{memory}: does not fit", *[""] * 5)
    percent = {end: 100 * value for end, value in found["mfu"].items()}
    communication = f"{found['step_ms']['communication']:.0f}"
    images = span(found["images_per_sec_per_chip"])
    days = span(found["days"], ".1f")
    return (*head, memory, span(found["step_ms"]), communication, span(percent), images, days)


def page(found: dict[str, dict]) -> str:
    rows = (row(*item) for item in found.items())
    return f"{HEAD}{markdown(COLUMNS, rows)}\n\n{UNSEEN}\n"


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
                f"--only={unknown[0]} is not in {RECIPES}: use one of {', '.join(recipes())}"
            )
        found = {}
        with concurrent.futures.ThreadPoolExecutor(max(args.jobs, 1)) as pool:
            options = [[f"--config={RECIPES}:{argument}"] for argument in wanted]
            for argument, result in zip(wanted, pool.map(plan, options), strict=True):
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
