"""Class token against the mean of the patch tokens: Figure 9 of arXiv 2010.11929, B/16 on JFT-300M.

    python -m vit_jax.study --config=configs/studies/heads.py --workdir=DIR

Expected: with the learning rate of the class token the mean is much worse, with a lower one it is
as good (section D.3).

Cost: three times 224 exaFLOPs.
"""


def get_config():
    mean = ["model.pool=gap", "model.pre_logits=True"]
    return dict(
        title="Class token and mean of the tokens",
        recipe="configs/studies/pretrain.py:B/16,jft300m",
        axes=dict(
            head={
                "class token, 8e-4": ["optim.lr=8e-4"],
                "mean, 8e-4": [*mean, "optim.lr=8e-4"],
                "mean, 3e-4": [*mean, "optim.lr=3e-4"],
            }
        ),
        figure=dict(x="head", metric="eval/few/fewshot_5"),
    )
