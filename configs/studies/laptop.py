"""Studies of arXiv 2010.11929 at a size for two CPU cores, on `scattered_digits`.

    python -m vit_jax.study --config=configs/studies/laptop.py:data_size --workdir=DIR --jobs=2

`data_size`: accuracy against the number of training images, as in Figures 3 and 4.
`hybrids`: the same with a hybrid; its other runs are those of `data_size`.
`compute`: accuracy against exaFLOPs, as in Figure 5.
`optimizers`: accuracy against the number of steps, with Adam and Muon.
`position_embeddings`: with none, and with three kinds, as in Table 8.
`heads`: class token and mean of the tokens against the learning rate, as in Figure 9.
`shapes`: depth, width, MLP width and patch size of the ViT, one changed at a time, as in Figure 8.

Cost and results: docs/studies.md.
"""

RECIPE = "configs/studies/small_models.py"
MUON = ["optim.name=muon", "optim.momentum=0.95"]
SEEDS = {seed: [f"seed={seed}"] for seed in "012"}


def study(axes: dict, figure: dict, **more) -> dict:
    """Test top-1, with three seeds."""
    figure = dict(over="seed", metric="eval/test/top1") | figure
    return dict(recipe=f"{RECIPE}:ViT", axes=axes | dict(seed=SEEDS), figure=figure, **more)


def models(*names: str) -> dict[str, list[str]]:
    return {name: [f"recipe={RECIPE}:{name}"] for name in names}


def steps(counts: tuple[int, ...]) -> dict[str, list[str]]:
    return {str(count): [f"total_steps={count}"] for count in counts}


def data_size(*more: str) -> dict:
    sizes = [512 * 4**i for i in range(5)]
    images = {str(size): [f"data.split=train[:{size}]"] for size in sizes}
    return study(
        dict(model=models("ViT", "ResNet", *more), images=images),
        dict(x="images", line="model"),
        title="Accuracy against the number of training images",
        overrides=["early_stopping=3", "checkpoint.keep_best=eval/val/top1"],
    )


def hybrids() -> dict:
    return data_size("hybrid")


def compute() -> dict:
    return study(
        dict(model=models("ViT", "ResNet", "hybrid"), steps=steps((250, 500, 1000))),
        dict(x="exaFLOPs", line="model"),
        title="Accuracy against compute",
    )


def optimizers() -> dict:
    return study(
        dict(optimizer={"Adam": [], "Muon": MUON}, steps=steps((250, 500, 1000, 2000))),
        dict(x="steps", line="optimizer"),
        title="Accuracy against the number of steps",
    )


def position_embeddings() -> dict:
    kinds = {"1-D": "learn", "2-D": "learn2d", "relative": "relative", "none": "none"}
    return study(
        dict(position={name: [f"model.posemb={kind}"] for name, kind in kinds.items()}),
        dict(x="position"),
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
        dict(x="learning rate", line="head"),
        title="Accuracy with class token and mean of the tokens",
        overrides=["total_steps=500"],
    )


def shapes() -> dict:
    scaled = {
        "depth": {depth: [f"model.depth={depth}"] for depth in (2, 8)},
        "width": {
            width: [f"model.width={width}", f"model.num_heads={width // 16}"] for width in (32, 128)
        },
        "MLP width": {width: [f"model.mlp_dim={width}"] for width in (64, 1024)},
        "patch size": {size: [f"model.variant=Ti/{size}"] for size in (8, 16)},
    }
    changes = dict(start=[])
    groups = {}
    for what, values in scaled.items():
        named = {f"{what} {value}": texts for value, texts in values.items()}
        groups[what] = ["start", *named]
        changes |= named
    return study(
        dict(shape=changes),
        dict(x="exaFLOPs", line="shape", groups=groups),
        title="Accuracy against the shape of a ViT",
        overrides=[*MUON, "total_steps=500"],
    )


STUDIES = dict(
    data_size=data_size,
    hybrids=hybrids,
    compute=compute,
    optimizers=optimizers,
    position_embeddings=position_embeddings,
    heads=heads,
    shapes=shapes,
)


def get_config(name: str = "data_size") -> dict:
    """`name`: one of `STUDIES`."""
    return STUDIES[name]()
