"""Trains on `digits` in float32 and in bfloat16 from the same seeds, and compares losses and test accuracies.

    python -m benchmarks.precision --out=docs/bfloat16.png

A minute per run on two CPU cores. Both runs of a seed have the same initial weights, batches and mixing.
"""

import argparse
import json
import pathlib
import statistics
import tempfile

import matplotlib
import numpy as np

from vit_jax import train

CONFIG = pathlib.Path(__file__).parent.parent / "configs/demo.py"
DTYPES = ("float32", "bfloat16")
WINDOW = 25  # steps over which losses are averaged


def losses_and_accuracy(folder: pathlib.Path, dtype: str, seed: int, steps: int) -> tuple[np.ndarray, float]:
    """Training loss of every step, and top-1 on the test split at the end."""
    settings = dict(total_steps=steps, total_epochs=0, seed=seed, log_every=1)
    settings |= {"model.dtype": dtype, "evals.val.every": 0, "evals.val.data.split": "test", "checkpoint.every": 0}
    arguments = [f"--config={CONFIG}", f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in settings.items())]
    if code := train.main(arguments):
        raise SystemExit(code)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/loss"] for line in lines if "train/loss" in line]
    return np.array(found), lines[-1]["eval/val/top1"]


def averaged(losses: np.ndarray) -> np.ndarray:
    """Means of consecutive windows: [..., steps] -> [..., steps / WINDOW]."""
    return losses.reshape(*losses.shape[:-1], -1, WINDOW).mean(-1)


def draw(losses: dict[str, np.ndarray], path: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    middle = np.arange(WINDOW / 2, losses["float32"].shape[1], WINDOW)
    for dtype, style in zip(DTYPES, ("-", "--"), strict=True):
        for curve in averaged(losses[dtype]):
            above.plot(middle, curve, style, color=dict(float32="C0", bfloat16="C1")[dtype], linewidth=1)
        above.plot([], [], style, color=dict(float32="C0", bfloat16="C1")[dtype], label=f"{dtype}, each seed")
    one, other = (averaged(losses[dtype]).mean(0) for dtype in DTYPES)
    below.plot(middle, 100 * (other / one - 1), color="C1")
    below.axhline(0, color="grey", linewidth=0.5)
    above.set_ylabel(f"training loss, means of {WINDOW} steps")
    below.set_ylabel("mean, difference in %")
    below.set_xlabel("step")
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, metavar="FILE.png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help=f"a multiple of {WINDOW}")
    args = parser.parse_args()
    losses, accuracies = {dtype: [] for dtype in DTYPES}, {dtype: [] for dtype in DTYPES}
    for seed in range(args.seeds):
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                loss, accuracy = losses_and_accuracy(pathlib.Path(folder), dtype, seed, args.steps)
            losses[dtype].append(loss)
            accuracies[dtype].append(accuracy)
    losses = {dtype: np.array(runs) for dtype, runs in losses.items()}
    one, other = (averaged(losses[dtype]).mean(0) for dtype in DTYPES)
    print(f"loss, means of {WINDOW} steps and {args.seeds} seeds: largest difference {max(abs(other / one - 1)):.2%}")
    print(f"of all {args.steps} steps: {other.mean() / one.mean() - 1:+.2%}")
    for dtype, runs in accuracies.items():
        print(f"test top-1, {dtype}: {statistics.mean(runs):.2%} ({', '.join(f'{run:.2%}' for run in runs)})")
    draw(losses, args.out)


if __name__ == "__main__":
    main()
