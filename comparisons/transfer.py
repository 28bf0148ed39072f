r"""Compares training on sprites, faces and textures from pretrained weights and from scratch.

    python -m comparisons.transfer DIR

takes three quarters of an hour on two cores. `comparisons.sprites` draws the sprites in DIR/data,
where `vit_jax.vtab` takes them for dSprites.

Pretraining sees digits, and sprites of the train split labelled with shape, scale, height, and
distance from the centre. The weights are transferred to four tasks: position of the sprites from
left to right, their orientation, faces (scikit-image's lfw_subset) and textures (its brick, grass
and gravel; `pip install -e '.[comparisons]'` has them). Every learning rate is chosen on validation
examples, from the same candidates for both.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from comparisons import sprites

ROOT = pathlib.Path(__file__).parent.parent
SPRITES = 30_000  # for pretraining
SIDE = 64  # of texture patches, in pixels
SEEDS = 3
MODEL = dict(variant="Ti/8", width=128, depth=6, mlp_dim=512, num_heads=4, pool="gap")

CONFIG = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.image_size = 32
    config.model = {model!r}
    {body}
    return config
"""

PRETRAIN = """config.total_epochs = 12
    config.loss = "sigmoid_xent"
    config.log_every = 200
    config.data = dict(name="csv:{csv}", split="train", batch_size=128, crop="resize", flip=False)
    config.optim = dict(name="adam", lr=1e-3, schedule="cosine", warmup_steps=200, wd=0.05)
    config.optim.grad_clip_norm = 1.0
    config.checkpoint = dict(every=1000, keep_last=1)"""

SUITE = """config.total_steps = 600
    config.data = dict(name="vtab", data_dir={data_dir!r}, batch_size=64, crop="random", flip=True)
    config.optim = dict(name="adam", lr=1e-3, schedule="cosine", warmup_steps=60, wd=0.0)
    config.optim.grad_clip_norm = 1.0
    config.evals = dict(test=dict(data=dict(crop="resize", batch_size=256)))
    config.vtab = dict(lrs=(1e-4, 3e-4, 1e-3, 3e-3), seeds={seeds})
    config.vtab.max_test_examples = 10000"""

FOLDER = """config.total_steps = 200
    config.data = dict(name="folder:{folder}", split="train", batch_size=32)
    config.data.update(crop="random", flip=True)
    config.optim = dict(name="adam", lr=1e-3, schedule="cosine", warmup_steps=20)
    config.optim.grad_clip_norm = 1.0
    config.evals = dict(test=dict(data=dict(split="test")))
    config.checkpoint = dict(every=0)"""


def save(image: np.ndarray, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def pretraining_data(folder: pathlib.Path) -> pathlib.Path:
    """A CSV of digits and sprites with several labels each."""
    csv = folder / "pretrain.csv"
    if csv.exists():
        return csv
    digits = load_digits()
    lines = ["path,labels"]
    for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        save(np.round(image * (255 / 16)).astype(np.uint8), folder / f"digits/{i}.png")
        lines.append(f"digits/{i}.png,digit {label}")
    order = sprites.tfds_order("train", [str(i) for i in range(sprites.COUNT)])
    # Without train800, the validation and the test examples.
    for number in order[1_000 : 1_000 + SPRITES].tolist():
        shape, scale, _, x, y = sprites.factors(number)
        save(sprites.image(number) * 255, folder / f"sprites/{number}.png")
        distance = round(math.hypot(x - 15.5, y - 15.5))
        labels = sprites.SHAPES[shape], f"scale {scale}", f"height {y // 2}", f"distance {distance}"
        lines.append(f"sprites/{number}.png,{';'.join(labels)}")
    csv.write_text("\n".join(lines) + "\n")
    return csv


def faces(folder: pathlib.Path) -> None:
    """100 faces and 100 other crops, half of each for training."""
    from skimage import data

    for i, image in enumerate(data.lfw_subset()):
        part = "test" if i % 2 else "train"
        name = "face" if i < 100 else "other"
        save(np.round(image * 255).astype(np.uint8), folder / f"{part}/{name}/{i}.png")


def textures(folder: pathlib.Path) -> None:
    """64 x 64 patches of three textures; those of the upper quarter are for training."""
    from skimage import data

    for name in ("brick", "grass", "gravel"):
        image = getattr(data, name)()
        for row in range(8):
            for column in range(8):
                patch = image[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
                part = "train" if row < 2 else "test"
                save(patch, folder / f"{part}/{name}/{row}{column}.png")


def config_file(path: pathlib.Path, body: str) -> str:
    path.write_text(CONFIG.format(model=MODEL, body=body))
    return f"--config={path}"


def run(*words: str) -> None:
    print("$ python -m", *words, flush=True)
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def suite(folder: pathlib.Path, weights: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Accuracies by task, start and seed on the sprites."""
    data_dir = str(folder / "data")
    sprites.write(data_dir)
    body = SUITE.format(data_dir=data_dir, seeds=SEEDS)
    # The model is that of the pretrained weights.
    init_from = f"config.init_from = {str(weights)!r}\n    config.model = dict()"
    names = "dsprites_label_x_position,dsprites_label_orientation"
    found = {}
    for start, more in (("pretrained", init_from), ("scratch", "")):
        config = config_file(folder / f"suite_{start}.py", f"{body}\n    {more}")
        workdir = folder / f"suite_{start}"
        run("vit_jax.vtab", "run", config, f"--workdir={workdir}", f"--tasks={names}")
        for name, task in json.loads((workdir / "vtab.json").read_text())["tasks"].items():
            found.setdefault(name, {})[start] = task["seeds"]
    return found


def folders(folder: pathlib.Path, weights: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Accuracies by data set, start and seed on images in folders; each chooses its own learning
    rate.
    """
    found = {}
    for name, make in (("faces", faces), ("textures", textures)):
        if not (folder / name).exists():
            make(folder / name)
        config = config_file(folder / f"{name}.py", FOLDER.format(folder=folder / name))
        for start, more in (("pretrained", [f"--config.init_from={weights}"]), ("scratch", [])):
            for seed in range(SEEDS):
                workdir = folder / f"{name}_{start}_{seed}"
                out = workdir.with_suffix(".json")
                arguments = [config, f"--workdir={workdir}", f"--json={out}", *more]
                arguments += [f"--config.seed={seed}", "--held_out=20%"]
                run("vit_jax.finetune", *arguments, "--lrs=0.0001,0.0003,0.001,0.003")
                top1 = json.loads(out.read_text())["final"]["eval/test/top1"]
                found.setdefault(name, {}).setdefault(start, []).append(top1)
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    csv = pretraining_data(folder)
    weights = folder / "pretrained"
    config = config_file(folder / "pretrain.py", PRETRAIN.format(csv=csv))
    run("vit_jax.train", config, f"--workdir={weights}")
    found = suite(folder, weights) | folders(folder, weights)
    print("| task | pretrained | from scratch | difference |\n|---|---|---|---|")
    from vit_jax.vtab.report import confidence

    for name, by_start in found.items():
        one, two = (np.asarray(by_start[start]) for start in ("pretrained", "scratch"))
        cells = [f"{100 * x.mean():.2f} ± {100 * confidence(x):.2f} %" for x in (one, two)]
        print(f"| {name} | {' | '.join(cells)} | {100 * (one.mean() - two.mean()):+.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
