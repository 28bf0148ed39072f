"""The named sizes: "B/16" -> width, depth, mlp_dim, num_heads, patch_size; "R50+B/16" adds a ResNet
stem.

"Mixer-B/16" and "R50x1" (a ResNet of BiT) name other architectures.
"""

import re
from collections.abc import Mapping

from vit_jax.config import is_own

# name: (width, depth, mlp_dim, num_heads). Ti: arXiv 2012.12877 table 1. S: arXiv 2106.10270 table
# 2. B, L, H: arXiv 2010.11929 table 1. g, G: arXiv 2106.04560 table 2. So400m: arXiv 2305.13035.
# giant2: the ViT-g of DINOv2 (arXiv 2304.07193), called so in its code.
SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "giant2": (1536, 40, 4096, 24),
}
SWIGLU = ("giant2",)  # all others have a GELU

# (stem, stride of the name): (bottleneck units by stage, patch side on the stem's output). The
# third stage of "R50 /16" holds the units of stages 3 and 4 of a ResNet-50 (arXiv 2010.11929
# section 4.1). "R+Ti/16" is the published name of a stem of stride 4 followed by patches of 8
# (arXiv 2106.10270).
STEMS = {
    ("R", 16): ((), 8),
    ("R26", 32): ((2, 2, 2, 2), 1),
    ("R50", 16): ((3, 4, 9), 1),
    ("R50", 32): ((3, 4, 6, 3), 1),
}

# name: (width, depth, tokens_mlp_dim, channels_mlp_dim). arXiv 2105.01601 table 1.
MIXERS = {
    "S": (512, 8, 256, 2048),
    "B": (768, 12, 384, 3072),
    "L": (1024, 24, 512, 4096),
    "H": (1280, 32, 640, 5120),
}

# Bottlenecks by stage of the ResNets (arXiv 1512.03385 table 1). "R50x3" is three times as wide
# (arXiv 1912.11370).
RESNETS = {
    "R50": (3, 4, 6, 3),
    "R101": (3, 4, 23, 3),
    "R152": (3, 8, 36, 3),
    "R200": (3, 24, 36, 3),
}

# What `decode` may return.
FIELDS = {
    *("architecture", "width", "depth", "mlp_dim", "num_heads", "mlp", "patch_size", "stem_units"),
    *("tokens_mlp_dim", "channels_mlp_dim", "units", "width_factor"),
}

_VIT = re.compile(r"(?:(?P<stem>R\d*)\+)?(?P<size>\w+)/(?P<patch>\d+)")
# vit_base_patch16_224, google/vit-base-patch16-224, vit_b_16, ViT-B_16, deit3_small_patch16_384
_OTHERS = re.compile(
    r"(?:[\w-]+/)?(?:(?:vit|deit3?)[-_])?(?P<size>[a-z]+(?:400m)?)"
    r"[-_/]?(?:patch)?[-_/]?(?P<patch>\d+)"
    r"(?:[-_](?P<side>\d+))?([._]\w*)?",
    re.IGNORECASE,
)
LONG = dict(tiny="Ti", small="S", base="B", large="L", huge="H", giant="g", gigantic="G")
LONG |= dict(ti="Ti", s="S", b="B", l="L", h="H", so400m="So400m")
_MIXER = re.compile(r"Mixer-(?P<size>\w+)/(?P<patch>\d+)")
_RESNET = re.compile(r"(?P<depth>R\d+)x(?P<factor>\d+)")


def decode(variant: str) -> dict:
    """Turns a name into constructor arguments, with `architecture` unless it is a ViT.

    Raises:
      ValueError: the name is not SIZE/PATCH, STEM+SIZE/PATCH, Mixer-SIZE/PATCH or RESNETxFACTOR
        with a known size.
    """
    match = _MIXER.fullmatch(variant)
    if match:
        return decode_mixer(variant, match)
    match = _RESNET.fullmatch(variant)
    if match:
        return decode_resnet(variant, match)
    match = _VIT.fullmatch(variant)
    if match is None or match["size"] not in SIZES or int(match["patch"]) == 0:
        raise ValueError(
            f"unknown variant {variant!r}: use SIZE/PATCH such as 'B/16' or STEM+SIZE/PATCH such "
            f"as 'R50+B/16', with SIZE one of {', '.join(SIZES)}; or 'Mixer-B/16', or 'R50x1'"
            f"{meant(variant)}"
        )
    width, depth, mlp_dim, num_heads = SIZES[match["size"]]
    patch = int(match["patch"])
    stem = {}
    if match["stem"]:
        if (match["stem"], patch) not in STEMS:
            known = ", ".join(f"{name}+.../{stride}" for name, stride in STEMS)
            raise ValueError(f"unknown stem in variant {variant!r}: known are {known}")
        units, patch = STEMS[match["stem"], patch]
        stem = {"stem_units": units}
    return dict(
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        mlp="swiglu" if match["size"] in SWIGLU else "gelu",
        patch_size=(patch, patch),
        **stem,
    )


def meant(variant: str) -> str:
    """ "; here it is VARIANT" for a name of timm, Hugging Face or torchvision, else ""."""
    found = _OTHERS.fullmatch(variant)
    size = found and (found["size"] if found["size"] in SIZES else LONG.get(found["size"].lower()))
    if not size:
        return ""
    text = f"; here it is {size}/{found['patch']}"
    return f"{text} with image_size={found['side']}" if found["side"] else text


def decode_mixer(variant: str, match: re.Match) -> dict:
    patch = int(match["patch"])
    if match["size"] not in MIXERS or patch == 0:
        known = ", ".join(f"Mixer-{size}/..." for size in MIXERS)
        raise ValueError(f"unknown variant {variant!r}: known Mixers are {known}")
    names = ("width", "depth", "tokens_mlp_dim", "channels_mlp_dim")
    sizes = dict(zip(names, MIXERS[match["size"]], strict=True))
    return dict(architecture="mixer", patch_size=(patch, patch), **sizes)


def decode_resnet(variant: str, match: re.Match) -> dict:
    if match["depth"] not in RESNETS or int(match["factor"]) == 0:
        known = ", ".join(f"{depth}x..." for depth in RESNETS)
        raise ValueError(f"unknown variant {variant!r}: known ResNets are {known}, such as 'R50x1'")
    return dict(
        architecture="bit", units=RESNETS[match["depth"]], width_factor=int(match["factor"])
    )


def name_of(fields: Mapping) -> str | None:
    """The variant of a model with these fields. A ViT of a size without a name has that of the
    nearest size with its stem and patch size; None if no name describes the model.
    """
    if is_own(fields["architecture"]):
        return fields["architecture"]
    if fields["architecture"] == "bit":
        factor = fields["width_factor"]
        names = [f"{depth}x{factor}" for depth in RESNETS if isinstance(factor, int)]
    elif fields["architecture"] == "mixer":
        names = [f"Mixer-{size}/{fields['patch_size'][0]}" for size in MIXERS]
    else:
        names = vit_names(fields)
    fixed = {"units", "tokens_mlp_dim", "channels_mlp_dim", "patch_size", "stem_units"}
    if fields["architecture"] == "mixer":
        fixed |= {"width", "depth"}  # which no config key overrides

    def agreeing(name: str) -> set[str]:
        return {key for key, value in decode(name).items() if fields[key] == value}

    fit = [name for name in names if decode(name).keys() & fixed <= agreeing(name)]
    return max(fit, key=lambda name: len(agreeing(name)), default=None)


def vit_names(fields: Mapping) -> list[str]:
    """The variants of all sizes with a stem and patch size."""
    stem = fields["stem_units"]
    patch = fields["patch_size"][0]
    if stem is None:
        return [f"{size}/{patch}" for size in SIZES]
    starts = [key for key, value in STEMS.items() if value == (stem, patch)]
    return [f"{name}+{size}/{stride}" for name, stride in starts for size in SIZES]
