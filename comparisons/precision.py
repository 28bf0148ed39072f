"""Compares losses and test accuracies on `digits` in float32 and bfloat16 from the same seeds.

    python -m comparisons.precision --out=docs/bfloat16.png

A run takes a minute on two CPU cores. All runs of a seed have the same initial weights, batches and
mixup. A third kind of run, in float32, sums its gradients in another order (over two halves of the
batch): its differences show the effect of rounding in float32.
"""

import argparse
import json
import pathlib
import statistics
import tempfile

import matplotlib
import numpy as np

from vit_jax.train import __main__ as train

CONFIG = pathlib.Path(__file__).parent.parent / "configs/demo.py"
FLOAT32 = "float32"
REORDERED = "float32, sums in another order"
BFLOAT16 = "bfloat16"
KINDS = {
    FLOAT32: {"model.dtype": "float32"},
    REORDERED: {"model.dtype": "float32", "accum_steps": 2},
    BFLOAT16: {"model.dtype": "bfloat16"},
}
WINDOW = 25  # steps over which losses are averaged


def losses_and_accuracy(
    folder: pathlib.Path, kind: str, seed: int, steps: int
) -> tuple[np.ndarray, float]:
    """Training loss of every step, and final top-1 on the test split."""
    settings = dict(total_steps=steps, total_epochs=0, seed=seed, log_every=1)
    settings |= {"evals.val.every": 0, "evals.val.data.split": "test", "checkpoint.every": 0}
    settings |= KINDS[kind]
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    code = train.main([f"--config={CONFIG}", f"--workdir={folder}", *overrides])
    if code:
        raise SystemExit(code)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/loss"] for line in lines if "train/loss" in line]
    return np.array(found), lines[-1]["eval/val/top1"]


def averaged(losses: np.ndarray) -> np.ndarray:
    """Means of consecutive windows: [..., steps] -> [..., steps / WINDOW]."""
    return losses.reshape(*losses.shape[:-1], -1, WINDOW).mean(-1)


def differences(losses: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Relative differences of the mean curve of each kind from float32's, [steps / WINDOW]."""
    curves = {kind: averaged(runs).mean(0) for kind, runs in losses.items()}
    return {kind: curve / curves[FLOAT32] - 1 for kind, curve in curves.items() if kind != FLOAT32}


def draw(losses: dict[str, np.ndarray], path: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = dict(figsize=(7, 6), height_ratios=(3, 2))
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, **sizes)
    midpoints = np.arange(WINDOW / 2, losses[FLOAT32].shape[1], WINDOW)
    styles = {
        FLOAT32: dict(color="C0"),
        REORDERED: dict(color="grey", ls=":"),
        BFLOAT16: dict(color="C1", ls="--"),
    }
    for kind, style in styles.items():
        first, *others = averaged(losses[kind])
        above.plot(midpoints, first, linewidth=1, label=f"{kind}, each seed", **style)
        for curve in others:
            above.plot(midpoints, curve, linewidth=1, **style)
    for kind, difference in differences(losses).items():
        below.plot(midpoints, 100 * difference, label=kind, **styles[kind])
    below.axhline(0, color="C0", linewidth=0.5)
    above.set_ylabel(f"training loss, means of {WINDOW} steps")
    below.set_ylabel("mean, difference\nfrom float32 in %")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, metavar="FILE.png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help=f"a multiple of {WINDOW}")
    args = parser.parse_args()
    losses = {kind: [] for kind in KINDS}
    accuracies = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                loss, accuracy = losses_and_accuracy(pathlib.Path(folder), kind, seed, args.steps)
            losses[kind].append(loss)
            accuracies[kind].append(accuracy)
    losses = {kind: np.array(runs) for kind, runs in losses.items()}
    for kind, difference in differences(losses).items():
        overall = losses[kind].mean() / losses[FLOAT32].mean() - 1
        largest = max(abs(difference))
        late = max(abs(difference[len(difference) // 2 :]))
        print(f"{kind}, loss relative to float32's, {args.seeds} seeds: {overall:+.2%} over all")
        print(
            f"  steps; means of {WINDOW} steps up to {largest:.2%}, in the second half {late:.2%}"
        )
    for kind, runs in accuracies.items():
        each = ", ".join(f"{run:.2%}" for run in runs)
        print(f"test top-1, {kind}: {statistics.mean(runs):.2%} ({each})")
    draw(losses, args.out)


if __name__ == "__main__":
    main()
