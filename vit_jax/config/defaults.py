"""Every key of a config, once: its default, what it means, which values it may have, when it
counts, and what depends on it (the fields of `Key`). All else about keys is derived from here. The
keys of the model are in model.py, of each objective in objectives.py, of evaluations in
evaluations.py.

    name=key(default, meaning, choices, within=(smallest, largest), only_if={key: values}, ...)

Numbers without a range are from 0 to 2^31 - 1. A key with `resume=True` may have another value when
a run is continued; one without may not. `state`: shapes the state; `per_host`: may differ between
hosts; `train_only`, `like_weights`, `of_weights`, `vtab`, `own`: see `Key`.
"""

import re
from collections.abc import Iterator, Mapping

import ml_collections

from vit_jax.config import objectives
from vit_jax.config.evaluations import EVAL, VTAB
from vit_jax.config.key import COUNT, DROP, DTYPES, LARGEST, METHODS, FreeKey, Key, together
from vit_jax.config.model import MODEL

key = Key  # in lower case, as it is written for every key below
BELOW_1 = (0.0, 1.0 - 1e-9)
SHARE = (0.0, 1.0)
POSITIVE = (1e-12, 1e6)
SIZE = (-1, LARGEST)  # of a mesh axis; the mesh refuses 0

BOX = {"data.crop": ("inception", "torchvision")}
RANDAUGMENT = {"data.randaug_layers": (1, 2, 3, 4)}
ADAM = {"optim.name": ("adam", "lamb", "muon")}
SGD = {"optim.name": ("sgd", "lars")}
MOMENTUM = {"optim.name": ("sgd", "lars", "adafactor", "muon")}
ADAFACTOR = {"optim.name": ("adafactor",)}
STAIR = {"optim.schedule": ("stair",)}
RSQRT = {"optim.schedule": ("rsqrt",)}

# fmt: off
RUN = dict(
    seed=key(0, "of initialisation, data order, augmentation and dropout"),
    prng=key("threefry2x32", "random numbers of dropout and of augmentation on the device; initial "
             "weights always come from threefry", {
                 "threefry2x32": "the same numbers everywhere",
                 "rbg": "cheaper on TPUs: dropout by a hash, the same everywhere; other random "
                        "numbers are the same only on the same chips, mesh and compiler"}),
    topology=key("", "the TPU pod that a recipe is meant for, such as v5e:16x16; `vit_jax.plan` "
                 "compiles for it", resume=True),
    total_steps=key(0, "updates; set this or total_epochs"),
    total_epochs=key(0.0, "passes over the training data, counting repeats; set this or "
                     "total_steps", vtab=False),
    image_size=key(224, "side in pixels, at training and evaluation; 0 in evaluate: that of the "
                   "weights", within=(0, 65_536), state=True),
    init_from=key("", "start from these weights: anything that `vit_jax.from_pretrained` reads, by "
                      "path, address or name"),
    branch_from=key("", "WORKDIR/checkpoints/STEP of another run: continue from its weights, "
                    "optimizer and step, perhaps with another schedule", vtab=False),
    init_allow=key("", "parameters that init_from may lack or not use, a regular expression; "
                   "'': none"),
    accum_steps=key(1, "microbatches per update", within=COUNT, resume=True),
    objective=key("classify", "what is optimized", objectives.KINDS, vtab=False,
                  own=("model", "total_steps")),
    loss=key("softmax_xent", "classification loss", {
        "softmax_xent": "softmax cross-entropy",
        "sigmoid_xent": "binary cross-entropy, summed over classes",
        "multilabel_xent": "binary cross-entropy of whether a class is in the mix at all"},
        own=("logits", "label")),
    mixup=key(0.0, "parameter of mixup's Beta distribution; 0: off"),
    cutmix=key(0.0, "likewise of CutMix; with both, each batch takes one of them"),
    label_smoothing=key(0.0, "share of every label that goes evenly to all classes", within=DROP),
    log_every=key(50, "steps between lines of metrics", within=COUNT, resume=True, vtab=False),
    pictures_every=key(0, "steps between pictures of the first images, in TensorBoard and "
                       "WORKDIR/pictures: where the model looks, and what the objective predicts; "
                       "how training sees them at each start; 0: none", resume=True, vtab=False),
    trackers=key((), "where metrics and pictures are sent, too, such as ('wandb',)", {
        "wandb": "Weights & Biases", "mlflow": "MLflow"}, own=("workdir",), resume=True,
        vtab=False),
    flush_every_s=key(10.0, "fewest seconds between two writes of log and metrics to a store",
                      within=(1.0, 3600.0), resume=True, per_host=True),
    early_stopping=key(0, "checkpoints in a row that are not better by checkpoint.keep_best, after "
                       "which the run ends; 0: off", vtab=False),
    max_skipped=key(10, "updates skipped in a row, because loss or gradients are not finite, that "
                    "end the run", within=COUNT, resume=True),
)

DATA = dict(
    name=key("digits", "digits | folder:PATH | tars:PATH | csv:PATH | mixture | a TFDS name",
             own=("split", "data_dir")),
    data_dir=key("", "where TFDS data are; '': the default of TFDS", resume=True, per_host=True),
    split=key("train", "a split, or a slice of one such as train[:99%]", vtab=False),
    mixture=key((), "(NAME@SPLIT, weight) pairs", pairs=(str, float), within=(1e-9, 1e9),
                only_if={"data.name": ("mixture",)}, vtab=False),
    subset=key("", "a random part with the classes in proportion, such as 10% or 5000; '': all",
               vtab=False),
    subset_seed=key(0, "which part", vtab=False),
    class_balance=key(0.0, "how often training sees an image of each class: in proportion to the "
                      "class's images to the power of 1 - this; 0: the data as they are, 1: all "
                      "classes equally often", within=SHARE, vtab=False),
    num_examples=key(0, "in the split; 0: ask the data", vtab=False),
    unlabelled=key(False, "read images alone, for an objective of your own that uses no labels",
                   state=True, vtab=False),
    batch_size=key(1024, "global, all devices together", within=COUNT),
    repeats=key(1, "repeated augmentation: copies of each image in a batch, each augmented anew",
                within=(1, 64), vtab=False),
    crop=key("inception", "how a training image is cropped", {
        "inception": "random area and aspect ratio",
        "torchvision": "the same, drawn as by torchvision's RandomResizedCrop",
        "random": "a share of each side",
        "simple": "resize the shorter side, reflect the border, crop",
        "resize": "the whole image"}, only_if=objectives.ONE_CROP),
    fraction=key(0.875, "share of each side in a random crop (224 / 256)", within=(1e-3, 1.0),
                 only_if={"data.crop": ("random",)}, vtab=False),
    decode=key("exact", "of JPEGs in training", {
        "exact": "all pixels of the crop, with TensorFlow's fast transform, as in big_vision",
        "accurate": "the same with libjpeg's accurate transform, as by Pillow and PyTorch's "
                    "loaders",
        "fast": "a half, quarter or eighth of its sides if that is no less than it is resized to: "
                "other pixels, faster for photographs of several megapixels"},
        only_if=objectives.ONE_CROP, vtab=False),
    method=key("bilinear", "of resizing", METHODS, only_if=objectives.ONE_CROP, vtab=False),
    area_min=key(0.05, "smallest share of the image in a crop of random area", within=(1e-6, 1.0),
                 only_if=BOX, vtab=False),
    flip=key(True, "flip with probability 0.5"),
    views=objectives.VIEWS,
    randaug_layers=key(0, "operations of RandAugment per image; 0: off", (0, 1, 2, 3, 4),
                       only_if=objectives.ONE_CROP),
    randaug_magnitude=key(10.0, "their strength", within=(0.0, 30.0), only_if=RANDAUGMENT),
    randaug_ops=key("big_vision", "whose RandAugment", {
        "big_vision": "16 operations", "timm": "15 operations, each with probability 0.5",
        "timm_inc": "the same with inc1: all strengths grow with the magnitude"},
        only_if=RANDAUGMENT),
    randaug_std=key(0.0, "standard deviation of the magnitude, timm's mstd", within=(0.0, 100.0),
                    only_if={"data.randaug_ops": ("timm", "timm_inc")}),
    three_augment=key(False, "DeiT III's: grayscale, solarize or blur, then colour jitter",
                      only_if=objectives.ONE_CROP),
    color_jitter=key(0.3, "largest relative change of brightness, contrast and saturation",
                     within=SHARE, only_if={"data.three_augment": (True,)}),
    erase=key(0.0, "probability that a rectangle is filled with noise", within=SHARE,
              only_if=objectives.ONE_CROP),
    augment=key((), "augmentations of your own, MODULE:FUNCTION, in this order",
                own=("image", "label", "key"), only_if=objectives.ONE_CROP),
    exif_rotation=key(True, "images of folders, tars and CSV files are turned upright as their "
                      "EXIF says, also at evaluation; those of TFDS never are, as in the published "
                      "pipelines", vtab=False),
    on_corrupt=key("error", "for an image that can't be decoded", {
        "error": "end the run", "skip": "count and list it"}, resume=True),
    threads=key(0, "host threads that read and decode; 0: one per core", within=(0, 1024),
                resume=True, per_host=True),
    prefetch=key(2, "batches ready on the device", within=(1, 1000), resume=True, per_host=True),
    eval_cache_gib=key(2.0, "memory of each host for decoded evaluation images, which are then "
                       "decoded once; 0: none", resume=True, per_host=True, vtab=False),
)

OPTIM = dict(
    name=key("adam", "optimizer", ("adam", "sgd", "adafactor", "lamb", "lars", "muon"), state=True,
             own=("schedule", "total_steps", "params")),
    lr=key(1e-3, "base learning rate", within=POSITIVE),
    lr_mults=key((), "(pattern, factor) pairs: the first pattern that matches the whole path of a "
                 "parameter scales its learning rate", pairs=(str, float), within=POSITIVE),
    layer_decay=key(1.0, "factor from the learning rate of each layer to that of the layer before; "
                    "1: off", within=(1e-3, 1.0)),
    frozen=key("", "a pattern: parameters that match do not change or decay, and have no optimizer "
               "state; '': none", state=True),
    schedule=key("cosine", "of the learning rate", (
        "cosine", "linear", "polynomial", "rsqrt", "stair", "constant"), own=("total_steps",)),
    warmup_steps=key(0, "from 0 to lr"),
    cooldown_steps=key(0, "to 0 at the end"),
    end_lr=key(0.0, "where it ends", only_if={"optim.schedule": ("linear", "polynomial")}),
    power=key(1.0, "exponent", within=(1e-3, 1e3), only_if={"optim.schedule": ("polynomial",)}),
    timescale=key(10_000, "steps in which the learning rate falls to lr / sqrt(2)", within=COUNT,
                  only_if=RSQRT),
    shift=key(0, "steps by which the schedule starts later on its curve", only_if=RSQRT),
    stairs=key((), "(step, factor) pairs: from the step on, lr is multiplied by the factor",
               pairs=(int, float), only_if=STAIR),
    stairs_after=key(False, "lr changes one update later, as in TensorFlow 1's piecewise_constant",
                     only_if=STAIR),
    wd=key(0.0, "decoupled weight decay"),
    wd_end=key(0.0, "weight decay at the end, reached by half a cosine; 0: that of the start",
               state=True),
    wd_times_lr=key(True, "decay times learning rate (AdamW); False: times the shape of the "
                    "schedule only (big_vision)",
                    only_if={"optim.name": ("adam", "sgd", "adafactor", "muon")}),
    wd_mults=key(((".*/kernel", 1.0),), "pairs like lr_mults; the rest does not decay",
                 pairs=(str, float)),
    grad_clip_norm=key(0.0, "largest global norm of the gradient; 0: off"),
    ema_decay=key(0.0, "Polyak averaging; 0: off", within=BELOW_1),
    momentum_dtype=key("float32", "of the first moment", DTYPES, state=True),
    b1=key(0.9, "decay of the first moment", within=BELOW_1, only_if=ADAM),
    b2=key(0.999, "decay of the second moment", within=BELOW_1, only_if=ADAM),
    eps=key(1e-8, "added to the root of the second moment", within=(1e-30, 1.0), only_if=ADAM),
    momentum=key(0.9, "decay of the first moment; 0: none, and no memory for it", within=BELOW_1,
                 only_if=MOMENTUM, state=True),
    nesterov=key(False, "Nesterov momentum", only_if=SGD),
    beta2_cap=key(0.999, "largest decay of the second moment", within=BELOW_1, only_if=ADAFACTOR),
    clipping_threshold=key(0.0, "largest RMS of an array's update; 0: off", only_if=ADAFACTOR),
)

MESH = together(resume=True, keys=dict(
    replica=key(1, "copies of the model across slow links", within=SIZE),
    data=key(-1, "data parallel; -1: the devices that remain", within=SIZE),
    fsdp=key(1, "data parallel with sharded parameters and optimizer", within=SIZE),
    tensor=key(1, "heads and MLP split over devices", within=SIZE),
    zero=key(False, "optimizer and averaged parameters are also split over data (ZeRO-1)"),
))

CHECKPOINT = together(resume=True, vtab=False, keys=dict(
    every=key(1000, "steps between checkpoints; 0: only at the end"),
    keep_last=key(2, "newest checkpoints kept", within=COUNT),
    keep_every=key(0, "also keep every checkpoint at a multiple of this; 0: off"),
    keep_best=key("", "also keep the best by this metric, such as eval/val/top1; '': off"),
    max_failures=key(3, "saves in a row that may fail, for example on a full disk; the last of "
                     "them ends the run", within=COUNT),
))

SPIKES = together(resume=True, vtab=False, keys=dict(
    factor=key(0.0, "a loss above this times its running median is high, such as 1.5; 0: off",
               within=(0.0, 1e6)),
    steps=key(10, "high losses in a row that are a spike: the run goes back to a checkpoint "
              "before it, and leaves out the batches since then", within=(1, 10_000)),
    window=key(100, "losses in the running median", within=(1, 10_000)),
    margin=key(100, "steps from the checkpoint to the spike, at least, if there is such a one"),
    max_rewinds=key(3, "times that the run goes back to one checkpoint; the next spike ends it",
                    within=COUNT),
))

PROFILE = together(resume=True, vtab=False, keys=dict(
    first_step=key(10, "step at which the profiler window opens"),
    num_steps=key(0, "steps in it; 0: no profile"),
))

ALWAYS = RUN | objectives.GROUPS | dict(
    model=MODEL, data=DATA, optim=OPTIM, mesh=MESH, checkpoint=CHECKPOINT, spikes=SPIKES,
    profile=PROFILE)
# fmt: on

# Every key below `config.user`.
USER = FreeKey(None, "for parts of the user's own")


def values(keys: Mapping) -> dict:
    """The defaults of a group of keys."""
    return {
        name: entry.default if isinstance(entry, Key) else values(entry)
        for name, entry in keys.items()
    }


def defaults() -> ml_collections.ConfigDict:
    """The whole configuration, without evaluations, VTAB's settings and keys of the user's own."""
    return ml_collections.ConfigDict(values(ALWAYS) | dict(evals={}, vtab={}, user={}))


def eval_defaults() -> dict:
    """One entry of `config.evals`."""
    return values(EVAL)


def vtab_defaults() -> dict:
    """`config.vtab`, if a config file sets a key of it."""
    return values(VTAB)


def flatten(config: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields ("a.b", value) for every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", as_tuple(value)


def as_tuple(value):
    """Lists, which is how JSON and some files hold tuples, become tuples at every depth."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


def generic(name: str) -> str:
    """Replaces the user's name of an evaluation by *: "evals.val.every" -> "evals.*.every"."""
    return re.sub(r"^evals\.[^.]+\.", "evals.*.", name)


# Every key by its generic name, such as evals.*.every.
KEYS: dict[str, Key] = (
    dict(flatten(ALWAYS)) | dict(flatten(EVAL, "evals.*.")) | dict(flatten(VTAB, "vtab."))
)


def find(name: str) -> Key | None:
    """The declaration of a key, by its name in a config; None if there is no such key."""
    if name.startswith("user."):
        return USER
    return KEYS.get(generic(name))


def known_keys() -> dict[str, object]:
    """Every key by its generic name, with its default."""
    return {name: entry.default for name, entry in KEYS.items()}


def may_change(name: str) -> bool:
    """Whether a run may be continued with another value of this key."""
    entry = find(name)
    return entry is not None and entry.resume


def shapes_state(name: str) -> bool:
    """Whether another value of this key would mean other arrays in the state."""
    entry = find(name)
    return entry is not None and entry.state


def may_differ_by_host(name: str) -> bool:
    """Whether the processes of one run may have different values of this key."""
    entry = find(name)
    return entry is not None and entry.per_host
