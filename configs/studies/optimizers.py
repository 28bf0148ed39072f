"""Adam against SGD for the pretraining of ResNets: Table 7 of arXiv 2010.11929, on JFT-300M.

    python -m vit_jax.study --config=configs/studies/optimizers.py --workdir=DIR

SGD has the hyperparameters of BiT (arXiv 1912.11370 section 3.3): momentum 0.9, learning rate 0.03
for each 256 images, weight decay 1e-4 in the loss, divided by 10 after 10/40, 23/40, 30/40 and
37/40 of the epochs, warm-up of 5,000 steps. Expected after fine-tuning, mean of five data sets:
R50x1 89.33 % with Adam and 88.79 % with SGD, R152x2 94.01 and 93.72 %; on ImageNet SGD wins for
R50x1.

Cost: twice 52 and twice 584 exaFLOPs.
"""

STEPS = 7 * 303_000_000 // 4096
STAIRS = [(round(STEPS * epoch / 40), 0.1**i) for i, epoch in enumerate((10, 23, 30, 37), 1)]


def get_config():
    recipe = "configs/studies/pretrain.py"
    sgd = ["optim.name=sgd", "optim.momentum=0.9", f"optim.lr={0.03 * 4096 / 256}"]
    sgd += ["optim.schedule=stair", f"optim.stairs={STAIRS}", "optim.warmup_steps=5000"]
    sgd += ["optim.wd=1e-4"]
    return dict(
        title="Adam and SGD for ResNets",
        recipe=f"{recipe}:R50x1,jft300m",
        axes=dict(
            model={model: [f"recipe={recipe}:{model},jft300m"] for model in ("R50x1", "R152x2")},
            optimizer={"Adam": [], "SGD": sgd},
        ),
        figure=dict(x="model", line="optimizer", metric="eval/few/fewshot_5"),
    )
