"""Which part of the shape of a ViT to scale: Figure 8 of arXiv 2010.11929, on JFT-300M.

    python -m vit_jax.study --config=configs/studies/shapes.py --workdir=DIR

The start is a model of 8 layers, width 1024, MLP width 2048 and patches of 32; depth, width, MLP
width, patch size, and all of them change one at a time. Expected: depth gains most, until 64 layers
and with diminishing returns after 16; width changes least; smaller patches gain without parameters
(section D.2). The paper has the sizes in its figure only; these are powers of two around the start.

Cost: 3,470 exaFLOPs.
"""

BASE = dict(depth=8, width=1024, mlp_dim=2048, patch_size=32)
SCALED = {
    "depth": [dict(depth=depth) for depth in (1, 2, 4, 16, 32, 64)],
    "width": [dict(width=width) for width in (256, 512, 2048)],
    "MLP width": [dict(mlp_dim=width) for width in (512, 1024, 4096, 8192)],
    "patch size": [dict(patch_size=size) for size in (8, 16, 64)],
}
SCALED["all"] = [
    dict(depth=4, width=512, mlp_dim=1024, patch_size=64),
    dict(depth=16, width=2048, mlp_dim=4096, patch_size=16),
]


def overrides(changed: dict) -> list[str]:
    shape = BASE | changed
    patch = shape.pop("patch_size")
    found = [f"model.{key}={value}" for key, value in shape.items()]
    # A name of a variant says the size of its patches.
    recipe = f"recipe=configs/studies/pretrain.py:L/{patch},jft300m"
    return [recipe, *found, f"model.num_heads={shape['width'] // 64}"]


def get_config():
    shapes = {"start": overrides({})}
    groups = {}
    for what, changes in SCALED.items():
        groups[what] = ["start"]
        for changed in changes:
            name = f"{what}: {', '.join(str(value) for value in changed.values())}"
            groups[what].append(name)
            shapes[name] = overrides(changed)
    return dict(
        title="Depth, width and patch size",
        recipe="configs/studies/pretrain.py:L/32,jft300m",
        axes=dict(shape=shapes),
        overrides=["total_epochs=7", "optim.lr=6e-4"],
        figure=dict(x="exaFLOPs", line="shape", groups=groups, metric="eval/few/fewshot_5"),
    )
