"""Every default once."""

import re
from collections.abc import Iterator, Mapping

import ml_collections


def defaults() -> ml_collections.ConfigDict:
    """The whole of the configuration."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of initialisation, data order, augmentation and dropout
    config.prng = "threefry2x32"  # of dropout and augmentation on the device. threefry2x32: the same numbers everywhere
    # | rbg: cheaper on TPUs, the same for the same chips, mesh and compiler only, and dropout in
    # steps of 1/256. Initial weights are always threefry's
    config.topology = (
        ""  # the TPU pod that a recipe is meant for, as v5e:16x16; `vit_jax.plan` compiles for it
    )
    config.total_steps = 0  # updates; this or total_epochs
    config.total_epochs = 0.0  # passes over the training data, repeats counted; this or total_steps
    config.image_size = (
        224  # side in pixels, at training and evaluation; 0 in evaluate: that of the weights
    )
    config.init_from = ""  # start from these weights: anything that `vit_jax.from_pretrained` reads
    config.branch_from = ""  # WORKDIR/checkpoints/STEP of another run of ours, whose weights, optimizer and step this
    # one goes on from; it may have another schedule
    config.init_allow = (
        ""  # parameters that they may lack or have left over, a regular expression; "": none
    )
    config.accum_steps = 1  # microbatches per update
    config.loss = "softmax_xent"  # softmax_xent | sigmoid_xent | multilabel_xent: is any of a class in the mix
    config.mixup = 0.0  # parameter of mixup's Beta distribution; 0: off
    config.cutmix = 0.0  # likewise of cutmix; with both, each batch takes one of them
    config.label_smoothing = 0.0  # share of every label that goes to all classes alike
    config.log_every = 50  # steps between lines of metrics
    config.max_skipped = (
        10  # updates left out in a row, because loss or gradients are not finite, that end the run
    )

    config.model = dict(
        variant="B/16",  # size and patch, with a ResNet stem as in R50+B/16
        width=0,  # overrides the variant's; 0: the variant's
        depth=0,  # likewise
        mlp_dim=0,  # likewise
        num_heads=0,  # likewise
        num_classes=0,  # 0: as many as the data set has
        pool="tok",  # tok: class token | gap: mean | map: attention pooling
        class_token=False,  # have one although `pool` does not read it
        distilled=False,  # DeiT's distillation token and second head
        registers=0,  # further tokens that nothing reads
        posemb="learn",  # learn: one row per token | learn2d: by row and column | relative | sincos2d: fixed | none
        posemb_at="stem",  # stem: once | every: each layer has its own | shared: each layer adds the same
        pre_logits=False,  # a tanh layer before the head, as wide as the model
        head_bias=0.0,  # initial bias of the head
        head_std=0.0,  # standard deviation of the initial head; 0: zeros
        fc_norm=False,  # the final LayerNorm follows the pooling
        gelu="tanh",  # tanh: the approximation of the published code | erf: exact, as timm and Hugging Face
        ln_eps=1e-6,  # epsilon of LayerNorm
        mean=(0.5, 0.5, 0.5),  # of the pixels, 0 to 1, as the model expects them
        std=(0.5, 0.5, 0.5),  # likewise
        dropout=0.0,  # after the position embedding, attention, and in the MLP
        droppath=0.0,  # stochastic depth of the last block
        droppath_shape="linear",  # linear: from 0 in the first block | constant: the same in all
        layer_scale=0.0,  # initial factor of every channel of the residual branches, which is learned; 0: none
        scan=False,  # one compiled block for all layers: compiles sooner
        remat="none",  # what is kept for the backward pass; the rest is computed again. none: the compiler decides |
        # names: those of remat_names | dots: results of matrix products with parameters | full: a
        # block's input alone
        remat_names=(
            "query",
            "key",
            "value",
            "attended",
            "hidden",
        ),  # attended: by attention; hidden: in the MLP
        dtype="float32",  # of activations and matrix products: float32 | bfloat16
        softmax_dtype="float32",  # of attention's softmax: float32 | bfloat16
        attention="auto",  # einsum: memory grows with the square of the tokens | splash: TPU | cudnn: NVIDIA |
        # blockwise: any platform | auto: by tokens, platform and dtype
    )
    config.data = dict(
        name="digits",  # digits | folder:PATH | tars:PATH | csv:PATH | mixture | a TFDS name
        data_dir="",  # where TFDS data lies; "": TFDS's own default
        split="train",  # a split, or a slice of one such as train[:99%]
        mixture=(),  # of mixture: (NAME@SPLIT, weight) pairs
        subset="",  # a random part with the classes in proportion, as 10% or 5000; "": all
        subset_seed=0,  # which part
        num_examples=0,  # of the split; 0: ask the data
        batch_size=1024,  # global, all devices together
        repeats=1,  # how often a batch holds each of its examples, each time augmented anew
        crop="inception",  # inception: random area and aspect | random: a window of 7/8 the side | simple: of the small
        # side, mirrored at the border | resize: whole image
        method="bilinear",  # of resizing: bilinear | bicubic, which is antialiased
        area_min=0.05,  # smallest share of the image that an inception crop covers
        flip=True,  # mirror half of the images
        randaug_layers=0,  # operations of RandAugment per image; 0: off
        randaug_magnitude=10.0,  # their strength, 0 to 30
        three_augment=False,  # one of grey, solarized, blurred, and then colour jitter
        color_jitter=0.3,  # brightness, contrast and saturation are changed by up to this share
        erase=0.0,  # probability that a rectangle is filled with noise
        on_corrupt="error",  # an image that can't be decoded: error | skip (counted and named)
        threads=0,  # host threads that read and decode; 0: one per core
        prefetch=2,  # batches held ready on the device
        eval_cache_gib=2.0,  # memory of each host for decoded evaluation images, which are then decoded once; 0: none
    )
    config.optim = dict(
        name="adam",  # adam | sgd | adafactor | lamb
        lr=1e-3,  # base learning rate
        lr_mults=(),  # (pattern, factor) pairs: the first pattern that matches a parameter's whole path scales its lr
        layer_decay=1.0,  # factor from each layer's learning rate to that of the layer before it; 1: off
        frozen="",  # a pattern; what it matches is never changed, decays not, and has no optimizer state; "": off
        schedule="cosine",  # cosine | linear | polynomial | rsqrt | stair | constant
        warmup_steps=0,  # from 0 to lr
        cooldown_steps=0,  # to 0 at the end
        end_lr=0.0,  # where the linear and polynomial schedules end
        power=1.0,  # exponent of the polynomial schedule
        timescale=10_000,  # steps in which the rsqrt schedule falls to lr / sqrt(2)
        shift=0,  # steps by which the rsqrt schedule starts further on
        stairs=(),  # of the stair schedule: (step, factor) pairs; from the step on, lr is multiplied by the factor
        wd=0.0,  # decoupled weight decay
        wd_times_lr=True,  # decay times learning rate (AdamW); False: times the schedule's shape only (big_vision)
        wd_mults=(
            (".*/kernel", 1.0),
        ),  # (pattern, factor) pairs as lr_mults; what no pattern matches does not decay
        grad_clip_norm=0.0,  # largest global norm of the gradient; 0: off
        ema_decay=0.0,  # Polyak averaging; 0: off
        momentum_dtype="float32",  # of the first moment: float32 | bfloat16
        b1=0.9,  # first moment of adam and lamb
        b2=0.999,  # second moment of adam and lamb
        eps=1e-8,  # added to the root of the second moment of adam and lamb
        momentum=0.9,  # of sgd and adafactor; 0: none, and no memory for it
        nesterov=False,  # Nesterov's momentum in sgd
        beta2_cap=0.999,  # largest decay of adafactor's second moment
        clipping_threshold=0.0,  # largest RMS of adafactor's update of one array; 0: off
    )
    config.mesh = dict(
        replica=1,  # copies of the model across slow links
        data=-1,  # data parallel; -1: the devices that remain
        fsdp=1,  # data parallel with sharded parameters and optimizer
        tensor=1,  # heads and MLP split over devices
        zero=False,  # optimizer and averaged parameters are also split over data (ZeRO-1)
    )
    config.evals = {}  # name -> see `eval_defaults`
    config.vtab = {}  # of `vit_jax.vtab` alone: see `vtab_defaults`
    config.checkpoint = dict(
        every=1000,  # steps between checkpoints; 0: only at the end
        keep_last=2,  # newest checkpoints kept
        keep_every=0,  # also keep every checkpoint at a multiple of this; 0: off
        keep_best="",  # also keep the best by this metric, such as eval/val/top1; "": off
        max_failures=3,  # saves in a row that may fail, as on a full disk; the last of them ends the run
    )
    config.profile = dict(
        first_step=10,  # step at which the profiler window opens
        num_steps=0,  # steps in it; 0: no profile
    )
    return config


def eval_defaults() -> dict:
    """One entry of `config.evals`."""
    return dict(
        type="classification",  # classification: top1, loss, count | on frozen features, by training examples of
        # data.train_split: fewshot: ridge regression | knn: nearest neighbours | linear_probe:
        # logistic regression
        every=0,  # steps between evaluations; 0: only at the end
        among="all",  # of classification: choose between all classes | present: those that occur in the data
        shots=(5, 10, 25),  # of fewshot: training examples per class
        seeds=3,  # of fewshot: choices of these, over which the accuracy is averaged
        l2=1024.0,  # of fewshot: weight of the penalty
        neighbours=20,  # of knn: how many vote
        temperature=0.07,  # of knn: a vote weighs exp(cosine similarity / temperature)
        data=dict(
            name="",  # "": data.name
            data_dir="",  # "": data.data_dir
            split="test",  # split or slice
            rest=False,  # in the place of a split: what data.subset leaves out of the training data
            train_split="train",  # likewise, where training examples are needed
            batch_size=0,  # 0: data.batch_size
            crop="resize",  # resize: whole image | central: small side to image_size / fraction, then the centre
            fraction=0.875,  # share of the small side that the central crop keeps (224 / 256)
            method="",  # of resizing: bilinear | bicubic, which is antialiased | "": bilinear, area before a crop
        ),
    )


def vtab_defaults() -> dict:
    """`config.vtab`, where a config file sets a key of it."""
    return dict(
        protocol="vit",  # what results are compared with; what departs from it is said: vit | lightweight
        lrs=(),  # learning rates to choose from on val200; (): optim.lr
        steps=(),  # likewise numbers of steps, with which warm-up and stairs are stretched; (): total_steps
        seeds=3,  # runs of the chosen setting: seed, seed + 1, ...
        score="mean",  # of these runs: mean | median
        max_test_examples=0,  # of each test split; 0: all
    )


def flatten(config: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields ("a.b", value) for every leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", as_tuple(value)


def as_tuple(value):
    """Lists, as which JSON and some files hold tuples, become tuples at every depth."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


def generic(key: str) -> str:
    """Replaces the user's name of an evaluation by *: "evals.val.every" -> "evals.*.every"."""
    return re.sub(r"^evals\.[^.]+\.", "evals.*.", key)


def known_keys() -> dict[str, object]:
    """Every generic key with its default."""
    parts = (
        flatten(defaults()),
        flatten(eval_defaults(), "evals.*."),
        flatten(vtab_defaults(), "vtab."),
    )
    return {key: value for part in parts for key, value in part}
