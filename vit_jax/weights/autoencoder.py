"""Weights of a masked autoencoder, encoder and decoder: fitted to one, and built with it."""

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.models.mae import DECODER, MaskedAutoencoder
from vit_jax.weights import adapt
from vit_jax.weights.formats.infer import decoder_sizes
from vit_jax.weights.formats.weights import Weights, naming
from vit_jax.weights.scan_layout import flatten, stack_blocks, unflatten

OPTIONS = ("mask_ratio", "norm_pixels")  # of the weights, unless they are given
HINT = "fetch the file again, or load the encoder alone and train a new decoder"


def check_wanted(objective: str, num_classes, allow: str) -> None:
    """Raises UserError for arguments of `from_pretrained` that no autoencoder has."""
    if objective != "mae":
        raise UserError(
            f'objective={objective!r} has no weights of its own: use objective="mae", or leave it '
            "out for the model alone"
        )
    if num_classes is not None or allow:
        raise UserError(
            'objective="mae" loads encoder and decoder whole: leave num_classes= and allow= out'
        )


def must_have_decoder(weights: Weights) -> None:
    """Raises UserError if weights are of a model alone."""
    if weights.objective != "mae" or not weights.extra:
        raise UserError(
            f"{weights.path} has no decoder of a masked autoencoder: leave objective= out for the "
            "model alone, or train with --config.objective=mae and --config.init_from"
        )


def fit_decoder(weights: Weights, model: MaskedAutoencoder) -> dict:
    """The saved decoder for `model`, as a tree: its positions are those of the model's grid.

    Raises:
      UserError: a parameter is missing, unused or of another shape.
    """
    source = adapt.source_model(weights, model.vit)
    if source.patch_size != model.vit.patch_size:
        raise UserError(
            f"the decoder of {weights.path} predicts patches of {source.patch_size}, not of "
            f"{model.vit.patch_size}: leave the patch size as it is"
        )
    params = dict(weights.extra)
    report = adapt.Report()
    if source.prefix != model.vit.prefix:
        adapt.change_prefix_rows(params, source, model.vit, report)
    adapt.resize_positions(params, source, model.vit, report)
    target = jax.eval_shape(model.init_decoder, jax.random.key(0))
    with naming(weights.path):
        adapt.compare(params, flatten({DECODER: target}), weights.file_names, HINT)
    return unflatten(params)[DECODER]


def build(weights: Weights, image_size=None, **overrides) -> tuple[MaskedAutoencoder, dict]:
    """(autoencoder, params): see `weights.load.from_pretrained`.

    Args:
      image_size: side or (h, w) in pixels; the positions of both halves are resampled.
      **overrides: fields of the ViT, and `OPTIONS`.
    """
    must_have_decoder(weights)
    sizes = decoder_sizes(weights.extra, weights.path, weights.file_names)
    options = {name: weights.settings[name] for name in OPTIONS if name in weights.settings}
    options |= {name: overrides.pop(name) for name in OPTIONS if name in overrides}
    fields = weights.fields | dict(num_classes=0, class_token="cls" in weights.params) | overrides
    if image_size is not None:
        fields["image_size"] = image_size
    vit = create.create(**fields)
    model = MaskedAutoencoder.build(vit, sizes, **options)
    params = adapt.adapt(weights, vit, new_head=False)
    if vit.scan:
        params = stack_blocks(params)
    return model, jax.tree.map(np.asarray, params) | {DECODER: fit_decoder(weights, model)}
