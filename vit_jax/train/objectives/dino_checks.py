"""Which models and configs DINO can train."""

import math

from vit_jax.errors import UserError
from vit_jax.train.objectives import block_masks
from vit_jax.train.objectives.koleo import group_size


def check(config, model) -> None:
    """Raises UserError if the model or the config does not fit."""
    if model.architecture != "vit" or model.distilled or "cls" not in dict(model.prefix):
        raise UserError(
            "objective=dino trains the class token of a ViT without a distillation token: use "
            "model.pool=tok or model.class_token=True, model.distilled=False, and a ViT as "
            "model.variant"
        )
    if model.pool == "map" or model.fc_norm:
        raise UserError(
            "objective=dino trains neither attention pooling nor fc_norm: use model.pool=tok, and "
            "set them when you fine-tune"
        )
    if not config.optim.ema_decay:
        raise UserError(
            "objective=dino has the averaged parameters as its teacher, but optim.ema_decay is 0: "
            "set its momentum at the start, such as 0.996"
        )
    if config.dino.ibot and not block_masks.most(math.prod(model.grid)):
        raise UserError(
            "dino.ibot=True hides patches, but an image has only one: use smaller patches"
        )
    if config.data.views.local_count:
        check_local(config.data.views, model)
    check_groups(config)


def check_local(views, model) -> None:
    """Raises UserError if the model can't have images of the size of the local views."""
    if views.local_size < max(model.cell):
        raise UserError(
            f"data.views.local_size={views.local_size} is smaller than a patch of {model.cell} "
            "pixels: raise it"
        )
    is_fixed = model.posemb in ("sincos2d", "none")
    is_resampled = model.posemb == "learn" and model.posemb_at == "stem"
    if not is_fixed and not is_resampled:
        raise UserError(
            f"objective=dino has local views of another size, which model.posemb={model.posemb} at "
            f"{model.posemb_at} can't have: use learn at stem or sincos2d, or set "
            "data.views.local_count=0"
        )


def check_groups(config) -> None:
    """Raises UserError if microbatches would change the neighbours of KoLeo."""
    batch_size = config.data.batch_size
    multiple = group_size(batch_size) * config.accum_steps
    if config.dino.koleo and batch_size % multiple:
        raise UserError(
            f"data.batch_size={batch_size} with accum_steps={config.accum_steps} can't be divided "
            f"into the groups of {group_size(batch_size)} images of dino.koleo: use a multiple of "
            f"{multiple}, or set dino.koleo=0"
        )
