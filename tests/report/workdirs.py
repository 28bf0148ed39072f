"""Workdirs as runs write them, without a run."""

import json
import pathlib

import numpy as np
from PIL import Image

from vit_jax import config as configs

SIZES = dict(
    total_steps=100,
    batch_size=64,
    num_examples=1_000,
    num_classes=10,
    parameters=12_345,
    train_flops_per_image=2_000_000,
)
PARTS = dict(
    waiting=0.0,
    startup=4.0,
    compilation=6.0,
    data_wait=1.0,
    steps=30.0,
    repeated_steps=0.0,
    evaluation=5.0,
    saves=4.0,
)
START = dict(begun=1.7e9, first_step=0, last_step=100, steps_repeated=0, parts=PARTS)


def make_lines(count: int = 20, every: int = 5) -> list[dict]:
    """Lines of metrics: a loss that falls, a step of 100 ms, and an evaluation at every other."""
    lines = []
    for i in range(1, count + 1):
        line = {"step": i * every, "train/loss": 2 / i, "train/lr": 0.001 * i}
        line |= {"perf/step_ms": 100.0, "data/skipped": 0}
        if i % 2 == 0:
            line |= {"eval/val/top1": 1 - 1 / i, "eval/val/loss": 1 / i, "eval/val/count": 360}
        lines.append(line)
    return lines


def make_run(folder: pathlib.Path, loaded, lines: list[dict] | None = None, **record) -> str:
    """Writes a workdir, and returns its path.

    Args:
      loaded: its config.
      record: more of config.json, or other values.
    """
    folder.mkdir(parents=True)
    words = ["/x/vit_jax/train/__main__.py", "--config=tiny.py", f"--workdir={folder}"]
    about = dict(config=configs.to_json(loaded), sizes=SIZES, command=words, commit="c0ffee")
    (folder / "config.json").write_text(json.dumps(about | record))
    text = "".join(json.dumps(line) + "\n" for line in lines or make_lines())
    (folder / "metrics.jsonl").write_text(text)
    (folder / "goodput.json").write_text(json.dumps(dict(records=[START])))
    (folder / "checkpoints/50").mkdir(parents=True)
    (folder / "checkpoints/100").mkdir()
    return str(folder)


def make_picture(path: pathlib.Path, height: int = 40, width: int = 60) -> None:
    """A picture that can't be compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)


SUMMARY = dict(
    name="test",
    weights="run",
    step=100,
    count=360,
    top1=0.9,
    top5=0.99,
    loss=0.3,
    ece=0.02,
    macro_f1=0.89,
    mean_average_precision=None,
    calibration=[],
    class_names=["zero", "one", "two"],
    pairs=[[1, 2, 7], [2, 0, 3]],
    num_classes=3,
)


def make_evaluation(folder: pathlib.Path, **more) -> None:
    """What `vit_jax.evaluate --out` writes of one evaluation."""
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | more))
    for name in ("confusion.png", "mistakes.jpg"):
        make_picture(folder / name)
