"""The named sizes: "B/16" -> width, depth, mlp_dim, num_heads, patch_size; "R50+B/16" adds a ResNet stem."""

import re

# name: (width, depth, mlp_dim, num_heads). Ti: arXiv 2012.12877 table 1. S: arXiv 2106.10270 table 2. B, L, H: arXiv
# 2010.11929 table 1. g, G: arXiv 2106.04560 table 2. So400m: arXiv 2305.13035.
SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}

# (stem, stride of the name): (bottleneck units by stage, patch side on the stem's output). The third stage of "R50 /16"
# holds the units of stages 3 and 4 of a ResNet-50 (arXiv 2010.11929 section 4.1). "R+Ti/16" is the published name of a
# stem of stride 4 followed by patches of 8 (arXiv 2106.10270).
STEMS = {
    ("R", 16): ((), 8),
    ("R26", 32): ((2, 2, 2, 2), 1),
    ("R50", 16): ((3, 4, 9), 1),
    ("R50", 32): ((3, 4, 6, 3), 1),
}

_PATTERN = re.compile(r"(?:(?P<stem>R\d*)\+)?(?P<size>\w+)/(?P<patch>\d+)")


def decode(variant: str) -> dict:
    """Turns a name into constructor arguments of `vit.VisionTransformer`.

    Raises:
      ValueError: the name is not SIZE/PATCH or STEM+SIZE/PATCH with a known size and stem.
    """
    match = _PATTERN.fullmatch(variant)
    if match is None or match["size"] not in SIZES or int(match["patch"]) == 0:
        raise ValueError(
            f"unknown variant {variant!r}: use SIZE/PATCH such as 'B/16' or STEM+SIZE/PATCH such as 'R50+B/16', "
            f"with SIZE one of {', '.join(SIZES)}"
        )
    width, depth, mlp_dim, num_heads = SIZES[match["size"]]
    patch, stem = int(match["patch"]), {}
    if match["stem"]:
        if (match["stem"], patch) not in STEMS:
            known = ", ".join(f"{name}+.../{stride}" for name, stride in STEMS)
            raise ValueError(f"unknown stem in variant {variant!r}: known are {known}")
        units, patch = STEMS[match["stem"], patch]
        stem = {"stem_units": units}
    return dict(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=num_heads, patch_size=(patch, patch), **stem)
