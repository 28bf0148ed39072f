"""Studies of arXiv 2010.11929 at a size for two CPU cores, on `scattered_digits`.

    python -m vit_jax.study --config=configs/studies/laptop.py:data_size --workdir=DIR --jobs=2

`data_size`: accuracy against the number of training images, as in Figures 3 and 4.
`optimizers`: accuracy against the number of steps, with Adam and Muon.

Cost and results: docs/studies.md.
"""

RECIPE = "configs/studies/small_models.py"
SEEDS = {seed: [f"seed={seed}"] for seed in "012"}


def study(x: str, values: dict, line: str, lines: dict, **more) -> dict:
    """Test top-1 against axis `x`, by axis `line`, with three seeds."""
    figure = dict(x=x, line=line, over="seed", metric="eval/test/top1")
    axes = {line: lines, x: values, "seed": SEEDS}
    return dict(recipe=f"{RECIPE}:ViT", axes=axes, figure=figure, **more)


def data_size() -> dict:
    sizes = [512 * 4**i for i in range(5)]
    return study(
        "images",
        {str(size): [f"data.split=train[:{size}]"] for size in sizes},
        "model",
        {"ViT": [], "ResNet": [f"recipe={RECIPE}:ResNet"]},
        title="Accuracy against the number of training images",
        overrides=["early_stopping=3", "checkpoint.keep_best=eval/val/top1"],
    )


def optimizers() -> dict:
    return study(
        "steps",
        {str(count): [f"total_steps={count}"] for count in (250, 500, 1000, 2000)},
        "optimizer",
        {"Adam": [], "Muon": ["optim.name=muon", "optim.momentum=0.95"]},
        title="Accuracy against the number of steps",
    )


STUDIES = dict(data_size=data_size, optimizers=optimizers)


def get_config(name: str = "data_size") -> dict:
    """`name`: one of `STUDIES`."""
    return STUDIES[name]()
