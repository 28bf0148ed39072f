"""Accuracy against the size of the data: Figure 4 of arXiv 2010.11929, on parts of JFT-300M.

    python -m vit_jax.study --config=configs/studies/data_size.py --workdir=DIR --jobs=N

The same hyperparameters for all sizes, and early stopping by the accuracy on images that are held
out. Expected: B/32 is far worse than R50x1 on 9 million images and better from 90 million on, and
so are L/16 and R152x2. "half B/32" has all widths halved, the paper's ViT-b/32 (section 4.3). The
paper does not say how long it trained at most; here all have the steps of the full data.

Cost: at most 6,750 exaFLOPs.
"""

MODELS = ("B/32", "L/32", "L/16", "R50x1", "R152x2")
IMAGES = 303_000_000
SIZES = {"9000000": 9_000_000, "30000000": 30_000_000, "90000000": 90_000_000}
SIZES["303000000"] = IMAGES - 100_000  # that are held out
STEPS = 7 * IMAGES // 4096


def get_config():
    recipe = "configs/studies/pretrain.py"
    models = {model: [f"recipe={recipe}:{model},jft300m"] for model in MODELS}
    halved = dict(width=384, mlp_dim=1536, num_heads=6)
    models["half B/32"] = [f"model.{key}={value}" for key, value in halved.items()]
    return dict(
        title="Accuracy against the size of the data",
        recipe=f"{recipe}:B/32,jft300m",
        axes=dict(
            model=models,
            images={name: [f"data.split=train[:{size}]"] for name, size in SIZES.items()},
        ),
        overrides=[
            f"total_steps={STEPS}",
            "total_epochs=0",
            "early_stopping=5",
            "checkpoint.every=20000",
            "checkpoint.keep_best=eval/held_out/top1",
        ],
        figure=dict(
            x="images", line="model", metric="eval/few/fewshot_5", x_label="images of JFT-300M"
        ),
    )
