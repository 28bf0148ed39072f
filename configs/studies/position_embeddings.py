"""Position embeddings: Table 8 of arXiv 2010.11929, B/16 on JFT-300M.

    python -m vit_jax.study --config=configs/studies/position_embeddings.py --workdir=DIR

Expected, 5-shot accuracy on ImageNet: 61.4 % without position embedding, and 63.9 to 64.3 % with
any; the paper trained one seed.

Cost: eight times 224 exaFLOPs.
"""

KINDS = {"1-D": "learn", "2-D": "learn2d"}
PLACES = {"stem": "stem", "every layer": "every", "every layer, shared": "shared"}


def get_config():
    cells = {name: [f"model.posemb={name}"] for name in ("none", "relative")}
    for kind, posemb in KINDS.items():
        for place, where in PLACES.items():
            cells[f"{kind}, {place}"] = [f"model.posemb={posemb}", f"model.posemb_at={where}"]
    return dict(
        title="Position embeddings",
        recipe="configs/studies/pretrain.py:B/16,jft300m",
        axes=dict(position=cells),
        figure=dict(x="position", metric="eval/few/fewshot_5"),
    )
