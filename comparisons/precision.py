"""Trains on `digits` in float32 and in bfloat16 from the same seeds, and compares losses and test
accuracies.

    python -m comparisons.precision --out=docs/bfloat16.png

A minute per run on two CPU cores. All runs of a seed have the same initial weights, batches and
mixing. One more, in float32, adds its gradients up in another order (of two halves of the batch):
what parts from that one is rounding, too.
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
FLOAT32, REORDERED, BFLOAT16 = "float32", "float32, sums in another order", "bfloat16"
KINDS = {
    FLOAT32: {"model.dtype": "float32"},
    REORDERED: {"model.dtype": "float32", "accum_steps": 2},
    BFLOAT16: {"model.dtype": "bfloat16"},
}
WINDOW = 25  # steps over which losses are averaged


def losses_and_accuracy(
    folder: pathlib.Path, kind: str, seed: int, steps: int
) -> tuple[np.ndarray, float]:
    """Training loss of every step, and top-1 on the test split at the end."""
    settings = dict(total_steps=steps, total_epochs=0, seed=seed, log_every=1)
    settings |= KINDS[kind] | {
        "evals.val.every": 0,
        "evals.val.data.split": "test",
        "checkpoint.every": 0,
    }
    arguments = [
        f"--config={CONFIG}",
        f"--workdir={folder}",
        *(f"--config.{k}={v}" for k, v in settings.items()),
    ]
    if code := train.main(arguments):
        raise SystemExit(code)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/loss"] for line in lines if "train/loss" in line]
    return np.array(found), lines[-1]["eval/val/top1"]


def averaged(losses: np.ndarray) -> np.ndarray:
    """Means of consecutive windows: [..., steps] -> [..., steps / WINDOW]."""
    return losses.reshape(*losses.shape[:-1], -1, WINDOW).mean(-1)


def differences(losses: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the mean curves of each kind from float32's, as shares [steps / WINDOW]."""
    curves = {kind: averaged(runs).mean(0) for kind, runs in losses.items()}
    return {kind: curve / curves[FLOAT32] - 1 for kind, curve in curves.items() if kind != FLOAT32}


def draw(losses: dict[str, np.ndarray], path: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2)
    )
    middle = np.arange(WINDOW / 2, losses[FLOAT32].shape[1], WINDOW)
    looks = dict(
        zip(
            KINDS,
            (dict(color="C0"), dict(color="grey", ls=":"), dict(color="C1", ls="--")),
            strict=True,
        )
    )
    for kind, look in looks.items():
        for number, curve in enumerate(averaged(losses[kind])):
            above.plot(
                middle,
                curve,
                linewidth=1,
                label=f"{kind}, each seed" if number == 0 else None,
                **look,
            )
    for kind, difference in differences(losses).items():
        below.plot(middle, 100 * difference, label=kind, **looks[kind])
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
    losses, accuracies = {kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                loss, accuracy = losses_and_accuracy(pathlib.Path(folder), kind, seed, args.steps)
            losses[kind].append(loss)
            accuracies[kind].append(accuracy)
    losses = {kind: np.array(runs) for kind, runs in losses.items()}
    for kind, difference in differences(losses).items():
        overall, late = (
            losses[kind].mean() / losses[FLOAT32].mean() - 1,
            difference[len(difference) // 2 :],
        )
        print(
            f"{kind}, loss against float32's: {overall:+.2%} over all steps and {args.seeds} "
            "seeds; means of"
        )
        print(
            f"  {WINDOW} steps by up to {max(abs(difference)):.2%}, in the second half "
            f"{max(abs(late)):.2%}"
        )
    for kind, runs in accuracies.items():
        print(
            f"test top-1, {kind}: {statistics.mean(runs):.2%} "
            f"({', '.join(f'{run:.2%}' for run in runs)})"
        )
    draw(losses, args.out)


if __name__ == "__main__":
    main()
