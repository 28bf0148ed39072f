"""What other frameworks call our keys and values, for errors that say what is meant here.

The names are those of timm, big_vision, vision_transformer, MAE, and Hugging Face's Trainer and
models.
"""

import difflib
import re
from collections.abc import Iterable

# Our key or flag -> other names of it, without dashes.
NAMES = {
    "optim.lr": "learning_rate base_lr blr",
    "optim.name": "opt optimizer optax_name optimizer_name",
    "optim.wd": "weight_decay opt_wd",
    "optim.schedule": "sched scheduler lr_scheduler lr_scheduler_type decay_type lr_schedule",
    "optim.warmup_steps": "warmup warmup_epochs num_warmup_steps warmup_ratio linear_warmup_steps",
    "optim.grad_clip_norm": "clip_grad max_grad_norm grad_norm_clip grad_clip clip_norm",
    "optim.ema_decay": "model_ema_decay model_ema ema polyak_decay",
    "optim.momentum": "sgd_momentum",
    "optim.momentum_dtype": "optim_dtype mu_dtype",
    "optim.b1": "beta1 adam_beta1",
    "optim.b2": "beta2 adam_beta2",
    "optim.eps": "opt_eps adam_epsilon epsilon",
    "optim.layer_decay": "llrd layer_lr_decay",
    "total_epochs": "epochs num_epochs max_epochs num_train_epochs n_epochs",
    "total_steps": "steps max_steps num_steps num_training_steps train_steps max_iters",
    "data.views.global_area": "global_crops_scale",
    "data.views.local_area": "local_crops_scale",
    "data.views.local_count": "local_crops_number",
    "data.views.local_size": "local_crops_size",
    "data.batch_size": "train_batch_size per_device_train_batch_size batch bs b global_batch_size",
    "data.name": "dataset dataset_name data_path data_root train_dir train_data",
    "data.data_dir": "tfds_data_dir",
    "data.threads": "workers num_workers dataloader_num_workers j",
    "data.randaug_layers": "aa auto_augment randaugment randaug",
    "data.randaug_std": "mstd magnitude_std",
    "data.class_balance": "class_weight class_weights balanced weighted_sampler",
    "data.erase": "reprob random_erasing random_erase",
    "data.flip": "hflip flip_lr",
    "data.repeats": "repeated_aug aug_repeats",
    "accum_steps": "gradient_accumulation_steps grad_accum_steps accum_iter grad_accum",
    "early_stopping": "patience early_stopping_patience",
    "image_size": "img_size input_size resolution res image_resolution crop_size",
    "label_smoothing": "smoothing label_smoothing_factor",
    "log_every": "logging_steps log_interval log_training_steps progress_every",
    "checkpoint.every": "save_steps ckpt_steps checkpoint_every save_freq checkpoint_steps",
    "evals.NAME.every": "eval_steps eval_every log_eval_steps eval_freq",
    "evals.NAME.data.batch_size": "eval_batch_size per_device_eval_batch_size",
    "model.variant": "model model.name model_name arch architecture patch_size model_type",
    "model.width": "hidden_size embed_dim hidden_dim dim",
    "model.depth": "num_layers num_hidden_layers layers n_layers",
    "model.mlp_dim": "intermediate_size mlp_ratio",
    "model.num_heads": "num_attention_heads heads n_heads",
    "model.mlp": "ffn_layer mlp_layer",
    "model.pool": "pool_type global_pool classifier",
    "model.dropout": "drop drop_rate hidden_dropout_prob dropout_rate",
    "model.droppath": "drop_path drop_path_rate stoch_depth stochastic_depth",
    "model.dtype": "amp bf16 fp16 precision half_precision mixed_precision",
    "model.remat": "grad_checkpointing gradient_checkpointing",
    "model.layer_scale": "init_values layerscale layerscale_value",
    "seed": "random_seed rng_seed",
    "--init_from": "pretrained pretrained_path pretrained_dir finetune model_init weights "
    "model_name_or_path checkpoint_path initial_checkpoint model_or_filename",
    "--workdir": "output output_dir out_dir log_dir logdir save_dir",
}
FLAGS = [key for key in NAMES if key.startswith("--")]
KEYS_MEANT = {name: key for key, names in NAMES.items() for name in names.split()}

# Key -> value of others -> what to write here.
VALUES = {
    "optim.name": {
        "adamw": "adam, whose optim.wd is decoupled, as in AdamW",
        "adamw_torch": "adam, whose optim.wd is decoupled, as in AdamW",
        "momentum": "sgd, which has optim.momentum",
        "nadam": "adam",
        "scale_by_adam": "adam",
        "scale_by_adafactor": "adafactor",
    },
    "optim.schedule": {
        "cosine_decay": "cosine",
        "step": "stair",
        "multistep": "stair",
        "poly": "polynomial",
        "none": "constant",
    },
    "loss": {
        "cross_entropy": "softmax_xent",
        "ce": "softmax_xent",
        "softmax": "softmax_xent",
        "bce": "sigmoid_xent",
        "sigmoid": "sigmoid_xent",
    },
    "model.pool": {
        "token": "tok",
        "cls": "tok",
        "avg": "gap",
        "mean": "gap",
        "gap_layernorm": "gap with model.fc_norm",
    },
    "model.gelu": {"exact": "erf", "gelu": "erf", "gelu_new": "tanh", "approximate": "tanh"},
    "model.dtype": {"bf16": "bfloat16", "fp16": "bfloat16", "float16": "bfloat16"},
    "model.posemb": {"learned": "learn", "sincos": "sincos2d", "rel": "relative"},
}
DATA_SETS = {
    "imagenet": "imagenet2012",
    "imagenet1k": "imagenet2012",
    "imagenet_1k": "imagenet2012",
    "ilsvrc2012": "imagenet2012",
    "i1k": "imagenet2012",
    "imagenet22k": "imagenet21k",
    "imagenet_21k": "imagenet21k",
    "imagenet_22k": "imagenet21k",
    "i21k": "imagenet21k",
    "jft": "jft300m",
    "cifar": "cifar10 or cifar100",
    "cifar_10": "cifar10",
    "cifar_100": "cifar100",
    "pets": "oxford_iiit_pet",
    "flowers": "oxford_flowers102",
    "flowers102": "oxford_flowers102",
    "imagefolder": "folder:PATH",
}


def key_meant(name: str, known: Iterable[str]) -> str | None:
    """The key or flag that is meant by a name that is not a key: what another framework calls so,
    or a key with the same last word.
    """
    word = name.rpartition(".")[2].replace("-", "_").lower()
    meant = KEYS_MEANT.get(name) or KEYS_MEANT.get(word)
    if meant:
        return meant
    same = [key for key in known if key.rpartition(".")[2] == word and not key.startswith("evals.")]
    return same[0] if len(same) == 1 else None


def flag_meant(name: str, known: Iterable[str]) -> str:
    """What to write instead of the unknown flag --NAME, up to its value."""
    close = difflib.get_close_matches(f"--{name.replace('-', '_')}", FLAGS, n=1, cutoff=0.8)
    meant = key_meant(name, known) or "".join(close) or "KEY"
    return meant if meant in FLAGS else f"--config.{meant}"


def value_meant(name: str, value) -> str:
    """ "; here it is VALUE" for a value of a key that other frameworks have, else ""."""
    meant = VALUES.get(name, {}).get(str(value).lower())
    return f"; here it is {meant}" if meant else ""


def data_set_meant(name: str) -> str:
    """ "; here it is NAME" for a data set that others call so, else ""."""
    meant = DATA_SETS.get(re.sub(r"[-/ ]", "_", name.lower()))
    return f"; here it is {meant}" if meant else ""
