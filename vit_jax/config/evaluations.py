"""The keys of an evaluation (`config.evals.NAME`) and of VTAB (`config.vtab`)."""

from vit_jax.config.key import COUNT, METHODS, Key, together

key = Key
CLASSIFICATION = {"evals.*.type": ("classification",)}
FEWSHOT = {"evals.*.type": ("fewshot",)}
KNN = {"evals.*.type": ("knn",)}
WITHOUT_EFFECT = (".every", ".data_dir", ".batch_size")  # on what an evaluation measures
FROM_FEATURES = {"evals.*.type": ("fewshot", "knn", "linear_probe")}

# fmt: off
# One entry of `config.evals`, by the user's name for it.
EVAL = together(resume=True, keys=dict(
    type=key("classification", "what is measured; all but the first learn from frozen features of "
             "data.train_split", {
        "classification": "top1, loss, count", "fewshot": "ridge regression",
        "knn": "nearest neighbours", "linear_probe": "logistic regression"}, vtab=False,
        own=("logits", "features", "label", "train_features", "train_label", "num_classes",
             "settings", "model", "params", "batches")),
    every=key(0, "steps between evaluations; 0: only at the end", vtab=False),
    among=key("all", "the classes to choose between", {
        "all": "", "present": "those that occur in the data"}, only_if=CLASSIFICATION, vtab=False),
    shots=key((5, 10, 25), "training examples per class", items=int, within=COUNT, only_if=FEWSHOT),
    seeds=key(3, "random draws of them, over which the accuracy is averaged", within=(1, 1000),
              only_if=FEWSHOT),
    l2=key(1024.0, "weight of the penalty", within=(1e-12, 1e12), only_if=FEWSHOT),
    neighbours=key(20, "how many vote", within=COUNT, only_if=KNN),
    temperature=key(0.07, "a vote weighs exp(cosine similarity / temperature)", within=(1e-3, 1e3),
                    only_if=KNN),
    data=dict(
        name=key("", "'': data.name", vtab=False, own=("split", "data_dir")),
        data_dir=key("", "'': data.data_dir", per_host=True, vtab=False),
        split=key("test", "split or slice", vtab=False),
        rest=key(False, "instead of a split: what data.subset leaves out of the training data",
                 vtab=False),
        train_split=key("train", "where training examples come from", only_if=FROM_FEATURES),
        batch_size=key(0, "0: data.batch_size"),
        crop=key("weights", "how an image is cropped", {
            "resize": "the whole image",
            "central": "shorter side to image_size / fraction, then the centre",
            "weights": "as the weights expect; the published ones and a new run: the whole image"}),
        fraction=key(0.875, "share of the shorter side in a central crop (224 / 256)",
                     within=(1e-3, 1.0), only_if={"evals.*.data.crop": ("central",)}),
        method=key("", "of resizing", {
            "": "as the weights expect; the published ones and a new run: bilinear, or area before "
                "a central crop"} | METHODS),
    ),
))

# `config.vtab`, if a config file sets a key of it.
VTAB = dict(
    protocol=key("vit", "what results are compared with", ("vit", "lightweight")),
    lrs=key((), "learning rates to choose from on val200; (): optim.lr", items=float,
            within=(0.0, 1e6)),
    steps=key((), "lengths of training to choose from on val200, with warm-up and stairs in "
              "proportion; (): total_steps",
              items=int, within=COUNT),
    seeds=key(3, "runs of the chosen setting: seed, seed + 1, ...", within=(1, 1000)),
    score=key("mean", "of these runs", ("mean", "median")),
    max_test_examples=key(0, "of each test split; 0: all"),
)
# fmt: on
