"""Transfer against compute: Figure 5 and the 18 rows of Table 6 of arXiv 2010.11929, pretraining on
JFT-300M.

    python -m vit_jax.study --config=configs/studies/compute.py --dry_run

Expected: ViT needs half to a quarter of the compute of ResNets for the same accuracy after
fine-tuning, and hybrids are ahead of ViT at small sizes only. Accuracy from 5 images per class
stands for the mean of the paper's five fine-tunings.

Cost: 15,900 exaFLOPs in all.
"""

RECIPE = "configs/studies/pretrain.py"
# Epochs -> models.
ROWS = {
    7: ("B/32", "B/16", "L/32", "L/16", "R50x1", "R50x2", "R101x1", "R152x1", "R152x2"),
    14: ("L/16", "H/14", "R152x2", "R200x3", "R50+L/16"),
}
HYBRIDS = ("R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16")


def row(model: str, epochs: int) -> list[str]:
    return [f"recipe={RECIPE}:{model},jft300m", f"total_epochs={epochs}"]


def family(model: str) -> str:
    if "+" in model:
        return "hybrid"
    return "ViT" if "/" in model else "ResNet"


def get_config():
    rows = [(model, epochs) for epochs, models in ROWS.items() for model in models]
    rows += [(model, 7) for model in HYBRIDS]
    names = {f"{model}, {epochs} epochs": (model, epochs) for model, epochs in rows}
    groups = {"ViT": [], "ResNet": [], "hybrid": []}
    for name, (model, _) in names.items():
        groups[family(model)].append(name)
    return dict(
        title="Transfer against compute",
        recipe=f"{RECIPE}:B/16,jft300m",
        axes=dict(model={name: row(*own) for name, own in names.items()}),
        figure=dict(x="exaFLOPs", line="model", groups=groups, metric="eval/few/fewshot_5"),
    )
