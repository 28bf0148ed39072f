"""Studies of arXiv 2010.11929 at a size for two CPU cores, on `scattered_digits`.

    python -m vit_jax.study --config=configs/studies/laptop.py:data_size --workdir=DIR --jobs=2

`data_size`: accuracy against the number of training images, as in Figures 3 and 4.
`optimizers`: accuracy against the number of steps, with Adam and Muon.
`position_embeddings`: with none, and with three kinds, as in Table 8.
`heads`: class token and mean of the tokens against the learning rate, as in Figure 9.
`shapes`: depth, width, MLP width and patch size of the ViT, one changed at a time, as in Figure 8.

Cost and results: docs/studies.md.
"""

RECIPE = "configs/studies/small_models.py"
MUON = ["optim.name=muon", "optim.momentum=0.95"]
SEEDS = {seed: [f"seed={seed}"] for seed in "012"}


def study(axes: dict, **more) -> dict:
    """Test top-1 against the last of `axes`, a line for each value of the other one if there is
    another, with three seeds.
    """
    *lines, x = axes
    figure = dict(x=x, line="".join(lines), over="seed", metric="eval/test/top1")
    return dict(recipe=f"{RECIPE}:ViT", axes=axes | dict(seed=SEEDS), figure=figure, **more)


def data_size() -> dict:
    sizes = [512 * 4**i for i in range(5)]
    return study(
        dict(
            model={name: [f"recipe={RECIPE}:{name}"] for name in ("ViT", "ResNet", "hybrid")},
            images={str(size): [f"data.split=train[:{size}]"] for size in sizes},
        ),
        title="Accuracy against the number of training images",
        overrides=["early_stopping=3", "checkpoint.keep_best=eval/val/top1"],
    )


def optimizers() -> dict:
    return study(
        dict(
            optimizer={"Adam": [], "Muon": MUON},
            steps={str(count): [f"total_steps={count}"] for count in (250, 500, 1000, 2000)},
        ),
        title="Accuracy against the number of steps",
    )


def position_embeddings() -> dict:
    kinds = {"1-D": "learn", "2-D": "learn2d", "relative": "relative", "none": "none"}
    return study(
        dict(position={name: [f"model.posemb={kind}"] for name, kind in kinds.items()}),
        title="Accuracy with position embeddings",
        overrides=[*MUON, "total_steps=500"],
    )


def heads() -> dict:
    rates = (0.0003, 0.001, 0.003)
    return study(
        {
            "head": {"class token": ["model.pool=tok"], "mean of the tokens": []},
            "learning rate": {str(rate): [f"optim.lr={rate}"] for rate in rates},
        },
        title="Accuracy with class token and mean of the tokens",
        overrides=["total_steps=500"],
    )


def shapes() -> dict:
    changes = dict(start=[])
    changes |= {f"depth {depth}": [f"model.depth={depth}"] for depth in (2, 8)}
    for width in (32, 128):
        heads = f"model.num_heads={width // 16}"
        changes[f"width {width}"] = [f"model.width={width}", heads]
    changes |= {f"MLP width {width}": [f"model.mlp_dim={width}"] for width in (64, 1024)}
    changes |= {f"patch size {size}": [f"model.variant=Ti/{size}"] for size in (8, 16)}
    return study(
        dict(shape=changes),
        title="Accuracy against the shape of a ViT",
        overrides=[*MUON, "total_steps=500"],
    )


STUDIES = dict(
    data_size=data_size,
    optimizers=optimizers,
    position_embeddings=position_embeddings,
    heads=heads,
    shapes=shapes,
)


def get_config(name: str = "data_size") -> dict:
    """`name`: one of `STUDIES`."""
    return STUDIES[name]()
