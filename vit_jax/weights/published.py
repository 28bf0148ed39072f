"""Weights that were published as .npz on Google's storage: their names, which are the paths there,
and their addresses.

Sources: the lists of files in vision_transformer's README, vit_jax.ipynb and vit_jax_augreg.ipynb,
big_vision's models/vit.py and configs/proj/{flexivit,distill}/README.md, and big_transfer's README.
"""

import re

STORE = "https://storage.googleapis.com"
SUFFIX = ".npz"

# Files by folder on the store.
FILES = {
    "vit_models/imagenet21k": (
        *("ViT-B_8", "ViT-B_16", "ViT-B_32", "ViT-L_16", "ViT-L_32", "ViT-H_14"),
        *("R26+ViT-B_32", "R50+ViT-B_16", "R50+ViT-L_32"),
    ),
    "vit_models/imagenet21k+imagenet2012": (
        *("ViT-B_8", "ViT-B_16", "ViT-B_16-224", "ViT-B_32", "ViT-L_16", "ViT-L_16-224"),
        *("ViT-L_32", "R50+ViT-B_16"),
    ),
    "vit_models/sam": ("ViT-S_16", "ViT-B_16", "ViT-B_32", "ViT-L_16", "ViT-L_32"),
    "mixer_models/imagenet1k": ("Mixer-B_16", "Mixer-L_16"),
    "mixer_models/imagenet21k": ("Mixer-B_16", "Mixer-L_16"),
    "mixer_models/sam": ("Mixer-B_16", "Mixer-B_32"),
    "mixer_models/gsam": ("Mixer-S_8", "Mixer-S_16", "Mixer-S_32", "Mixer-B_16", "Mixer-B_32"),
    "bit_models": tuple(
        f"BiT-{data}-{net}{head}"
        for data, head in (("S", ""), ("M", ""), ("M", "-ILSVRC2012"))
        for net in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
    ),
    "bit_models/distill": ("R50x1_160", "R50x1_224", "R152x2_T_224", "R152x2_T_384"),
    "big_vision": ("vit_s16_i1k_90ep", "vit_s16_i1k_150ep", "vit_s16_i1k_300ep"),
    "big_vision/flexivit": (
        *(f"flexivit_{size}_i1k" for size in "sbl"),
        *(f"flexivit_{size}_i1k_{epochs}ep" for size in "sbl" for epochs in (90, 300, 600)),
        *(f"flexivit_b_i21k_{epochs}ep" for epochs in (90, 300, 1000)),
        *("vit_b16_i21k_300ep", "vit_b30_i21k_300ep"),
    ),
}

# AugReg (arXiv 2106.10270): the files that stand for a model, without "aug_". Its weights of
# ImageNet-21k are those that vision_transformer's README and big_vision recommend, and so are those
# fine-tuned at 384 pixels, and B_8; at 224 pixels they are those that timm copied.
AUGREG = {
    "Ti_16": "none-wd_0.03-do_0.0-sd_0.0",
    "Ti_16-224": "none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "Ti_16-384": "none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384",
    "S_32": "none-wd_0.1-do_0.0-sd_0.0",
    "S_32-224": "light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "S_32-384": "none-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
    "S_16": "light1-wd_0.03-do_0.0-sd_0.0",
    "S_16-224": "light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "S_16-384": "light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384",
    "B_32": "light1-wd_0.1-do_0.0-sd_0.0",
    "B_32-224": "medium1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "B_32-384": "light1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
    "B_16": "medium1-wd_0.1-do_0.0-sd_0.0",
    "B_16-224": "medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224",
    "B_16-384": "medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384",
    "B_8": "medium2-wd_0.1-do_0.0-sd_0.0",
    "B_8-224": "medium2-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "L_16": "strong1-wd_0.1-do_0.0-sd_0.0",
    "L_16-224": "medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224",
    "L_16-384": "strong1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
    "R_Ti_16": "none-wd_0.03-do_0.0-sd_0.0",
    "R_Ti_16-224": "none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224",
    "R_Ti_16-384": "none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384",
    "R26_S_32": "light1-wd_0.1-do_0.0-sd_0.0",
    "R26_S_32-224": "light0-wd_0.03-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.03-res_224",
    "R26_S_32-384": "light1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
    "R50_L_32": "medium1-wd_0.1-do_0.1-sd_0.1",
    "R50_L_32-224": "medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224",
    "R50_L_32-384": "medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_384",
}

# The names of AugReg's 52,000 files, and of BiT's 285 for VTAB-1k.
GRAMMARS = (
    r"vit_models/augreg/(Ti_16|S_32|S_16|B_32|B_16|B_8|L_16|R_Ti_16|R26_S_32|R50_L_32)-i2?1k"
    r"-\d+ep-lr_[\d.]+-aug_(none|(light|medium|strong)\d)-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(--[a-z0-9_]+-steps_\d+k-lr_[\d.]+-res_\d+)?",
    r"bit_models/vtab/BiT-M-(R50x1|R50x3|R101x1|R101x3|R152x4)-run[012]-[a-z0-9_-]+",
)
BUCKETS = ("vit_models", "mixer_models", "bit_models", "big_vision")


def augreg_path(name: str) -> str:
    """The path of the file that a short name of AugReg stands for."""
    model = name.split("-")[0]
    return f"vit_models/augreg/{model}-i21k-300ep-lr_0.001-aug_{AUGREG[name]}"


def short(path: str) -> str:
    """A path without its bucket, where the rest says which it is."""
    return re.sub("^(vit|mixer)_models/", "", path)


# Name -> path on the store, without the suffix.
PATHS = {
    short(f"{folder}/{file}"): f"{folder}/{file}"
    for folder, files in FILES.items()
    for file in files
} | {f"augreg/{name}": augreg_path(name) for name in AUGREG}


def address(path: str) -> str:
    """Of a path on the store, without the suffix."""
    return f"{STORE}/{path}{SUFFIX}"


def path_of(word: str) -> str | None:
    """The path on the store, without the suffix, that a name means; None if it is not one.

    A name may have the suffix and the bucket, and may be the end of a path if no other ends so.
    Any other file in one of the buckets has to have both.
    """
    name = short(word.removesuffix(SUFFIX))
    if name in PATHS:
        return PATHS[name]
    for path in (name, f"vit_models/{name}", f"vit_models/augreg/{name}"):
        if any(re.fullmatch(grammar, path) for grammar in GRAMMARS):
            return path
    found = {path for path in PATHS.values() if path.endswith(f"/{name}")}
    if len(found) == 1:
        return found.pop()
    bucket = word.split("/")[0]
    if bucket in BUCKETS and word.endswith(SUFFIX):
        return word.removesuffix(SUFFIX)
    return None


# Path on the store -> the model, as `models.variants` names it; FlexiViT has no patch size.
MODELS = (
    (r"augreg/(?:(R\d*)_)?(\w+)_(\d+)-", "{1}+{2}/{3}"),
    (r"/(?:(R\d*)\+)?ViT-(\w+)_(\d+)", "{1}+{2}/{3}"),
    (r"/(Mixer)-(\w+)_(\d+)", "{1}-{2}/{3}"),
    (r"/(?:BiT-.-)?(R\d+x\d)", "{1}"),
    (r"/vit_(\w)(\d+)_", "{1}/{2}"),
    (r"/(flexivit)_(\w)_", "{1}-{2}"),
)


def model_of(path: str) -> str:
    """The name of the model that a file on the store is of, such as "R50+B/16"."""
    for pattern, form in MODELS:
        match = re.search(pattern, path)
        if match:
            name = form.format(*(part or "" for part in (match[0], *match.groups())))
            name = name.removeprefix("+")
            return name.upper() if name[:2] in ("s/", "b/") else name
    raise ValueError(f"{path} is not a published file")


def files_of_model(word: str) -> list[str]:
    """The names of all weights of a model that is spelled in any usual way: ViT-B/16, B_16, b16."""
    return [name for name, path in PATHS.items() if bare(model_of(path)) == bare(word)]


def bare(word: str) -> str:
    """A spelling of a model without what differs between spellings."""
    word = word.lower().removesuffix(SUFFIX)
    for long, letter in (("tiny", "ti"), ("small", "s"), ("base", "b"), ("large", "l")):
        word = word.replace(long, letter)
    return re.sub(r"[^a-z0-9]", "", word.replace("huge", "h").replace("vit", ""))
