"""Studies of arXiv 2010.11929 at a size for two CPU cores, on `scattered_digits`.

    python -m vit_jax.study --config=configs/studies/laptop.py:data_size --workdir=DIR --jobs=2

`data_size`: accuracy against the number of training images, as in Figures 3 and 4.
`optimizers`: accuracy against the number of steps, with Adam and Muon.

Cost and results: docs/studies.md.
"""

RECIPE = "configs/studies/small_models.py"
SEEDS = {seed: [f"seed={seed}"] for seed in "012"}


def data_size() -> dict:
    sizes = [512 * 4**i for i in range(5)]
    return dict(
        title="Accuracy against the number of training images",
        recipe=f"{RECIPE}:ViT",
        axes=dict(
            model={"ViT": [], "ResNet": [f"recipe={RECIPE}:ResNet"]},
            images={str(size): [f"data.split=train[:{size}]"] for size in sizes},
            seed=SEEDS,
        ),
        overrides=["early_stopping=3", "checkpoint.keep_best=eval/val/top1"],
        figure=dict(
            x="images", line="model", over="seed", metric="eval/test/top1", x_label="images"
        ),
    )


def optimizers() -> dict:
    steps = [250 * 2**i for i in range(4)]
    return dict(
        title="Accuracy against the number of steps",
        recipe=f"{RECIPE}:ViT",
        axes=dict(
            optimizer={"Adam": [], "Muon": ["optim.name=muon", "optim.momentum=0.95"]},
            steps={str(count): [f"total_steps={count}"] for count in steps},
            seed=SEEDS,
        ),
        figure=dict(
            x="steps", line="optimizer", over="seed", metric="eval/test/top1", x_label="steps"
        ),
    )


STUDIES = dict(data_size=data_size, optimizers=optimizers)


def get_config(name: str = "data_size") -> dict:
    """`name`: one of `STUDIES`."""
    return STUDIES[name]()
