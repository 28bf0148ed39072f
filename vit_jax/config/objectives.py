"""The keys of each objective, which exist only if `config.objective` chooses it."""

import ml_collections

from vit_jax.config.key import LARGEST, Key, together

key = Key
SHARE = (1e-3, 1.0 - 1e-3)
WIDTH = (4, 2**20)

# fmt: off
KINDS = {
    "classify": "the label, by `loss`",
    "distill": "the label and a teacher's answer (DeiT, arXiv 2012.12877)",
    "masked_patches": "what corrupted patches show (arXiv 2010.11929 section 4.6)",
    "mae": "the pixels of hidden patches (arXiv 2111.06377)",
    "dino": "agreement of crops with a teacher (DINO, arXiv 2104.14294, with iBOT's masked "
            "patches)",
}
UNLABELLED = ("masked_patches", "mae", "dino")
# Without effect with these.
OF_LABELS = ("loss", "mixup", "cutmix", "label_smoothing", "data.class_balance")
OF_LABELS += ("model.num_classes", "model.pre_logits", "model.head_bias", "model.head_std")
MULTI_CROP = ("dino",)  # see several crops of every image
# Of keys that say how the one crop of an image is made.
ONE_CROP = {"objective": tuple(kind for kind in KINDS if kind not in MULTI_CROP)}

MASKED_PATCHES = together(only_if={"objective": ("masked_patches",)}, vtab=False, keys=dict(
    ratio=key(0.5, "share of the patches that are corrupted", within=SHARE),
    target=key("mean_color", "what is predicted of a patch", {
        "mean_color": "its mean colour, one of 512",
        "colors_4x4": "the same of its 4 x 4 parts",
        "pixels": "all of it, by the mean squared error"}, state=True),
))

MAE = together(only_if={"objective": ("mae",)}, vtab=False, keys=dict(
    mask_ratio=key(0.75, "share of the patches that are hidden", within=SHARE),
    norm_pixels=key(True, "predict pixels normalised by the mean and variance of their patch"),
    decoder_width=key(512, "embedding width of the decoder", within=WIDTH, state=True),
    decoder_depth=key(8, "its blocks", within=(1, 4096), state=True),
    decoder_heads=key(16, "its attention heads", within=(1, LARGEST), state=True),
))

SOFT = {"distill.kind": ("soft",)}
DISTILL = together(only_if={"objective": ("distill",)}, vtab=False, keys=dict(
    teacher=key("", "weights of the teacher: anything that init_from takes; may be elsewhere on "
                "resume, but must be the same", resume=True),
    teacher_variant=key("", "its variant, such as R50x1, with which --dry_run and plan need no "
                        "weights; '': read them", resume=True),
    teacher_size=key(0, "side in pixels of the images that it sees; 0: that of its weights",
                     within=(0, 65_536)),
    teacher_every=key(1, "steps from one answer of the teacher to the next; the others learn from "
                      "labels alone", within=(1, LARGEST)),
    kind=key("hard", "what the teacher says", {
        "hard": "its likeliest class", "soft": "its probabilities at `temperature`"}),
    weight=key(0.5, "of the teacher's part of the loss; the label has the rest",
               within=(0.0, 1.0)),
)) | dict(
    temperature=key(3.0, "of both softmaxes", within=(1e-3, 1e3), only_if=SOFT, vtab=False),
)

DINO = together(only_if={"objective": ("dino",)}, vtab=False, keys=dict(
    prototypes=key(65_536, "outputs of a head", within=(2, 2**24), state=True),
    head_width=key(2048, "width of its two hidden layers", within=WIDTH, state=True),
    bottleneck=key(256, "width of what is compared with the prototypes", within=WIDTH, state=True),
    centering=key("centering", "what keeps the teacher from collapsing", {
        "centering": "its running mean is subtracted (DINO)",
        "sinkhorn_knopp": "prototypes are used equally often in a batch (SwAV, DINOv2)"},
        state=True),
    teacher_temperature=key(0.07, "of its softmax; that of the student is 0.1",
                            within=(1e-3, 1e3)),
    temperature_warmup_steps=key(0, "from 0.04 to teacher_temperature"),
    freeze_last_layer=key(0, "first steps in which the prototypes do not change"),
    ibot=key(True, "patches are hidden, and their outputs are learned as well (arXiv 2111.07832)",
             state=True),
    koleo=key(0.1, "weight of the loss that keeps features apart (arXiv 1806.03198); 0: off"),
)) | dict(
    shared_head=key(False, "one head for images and patches", state=True,
                    only_if={"dino.ibot": (True,)}, vtab=False),
)

# `config.data.views`.
VIEWS = together(only_if={"objective": MULTI_CROP}, vtab=False, keys=dict(
    global_area=key((0.32, 1.0), "smallest and largest share of the image in the two global views",
                    items=float, within=(1e-6, 1.0)),
    local_area=key((0.05, 0.32), "the same of the local views", items=float, within=(1e-6, 1.0)),
    local_count=key(8, "local views of an image", within=(0, 64)),
    local_size=key(96, "their side in pixels", within=(1, 65_536)),
))
# fmt: on

GROUPS = dict(masked_patches=MASKED_PATCHES, mae=MAE, distill=DISTILL, dino=DINO)


def uses_labels(config: ml_collections.ConfigDict) -> bool:
    """Whether a run learns from labels; an objective of the user's own may."""
    return config.objective not in UNLABELLED and not config.data.unlabelled


def has_views(config: ml_collections.ConfigDict) -> bool:
    """Whether training sees several crops of every image, those of `config.data.views`."""
    return config.objective in MULTI_CROP
