"""The default weights of timm's models, which `timm.create_model(NAME, pretrained=True)` takes: of
timm 1.0.31, and of those models that can be read here.
"""

import re

HEADS = "vit|deit3?|flexivit|test_vit"
# Tag -> models.
MODELS = {
    "augreg2_in21k_ft_in1k": ("vit_base_patch8_224", "vit_base_patch16_224"),
    "augreg_in21k_ft_in1k": (
        *("vit_tiny_patch16_224", "vit_tiny_patch16_384", "vit_small_patch16_224"),
        *("vit_small_patch16_384", "vit_small_patch32_224", "vit_small_patch32_384"),
        *("vit_base_patch16_384", "vit_base_patch32_224", "vit_base_patch32_384"),
        *("vit_large_patch16_224", "vit_large_patch16_384"),
    ),
    "orig_in21k_ft_in1k": ("vit_large_patch32_384",),
    "orig_in21k": ("vit_large_patch32_224", "vit_huge_patch14_224"),
    "in21k": ("vit_base_patch16_224_miil",),
    "dino": ("vit_small_patch8_224",),
    "lvd142m": tuple(
        f"vit_{size}_patch14{registers}_dinov2"
        for size in ("small", "base", "large", "giant")
        for registers in ("", "_reg4")
    ),
    "fb_in1k": (
        *(f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")),
        *(f"deit_{size}_distilled_patch16_224" for size in ("tiny", "small", "base")),
        *("deit_base_patch16_384", "deit_base_distilled_patch16_384"),
        *(f"deit3_{size}_patch16_224" for size in ("small", "medium", "base", "large")),
        *(f"deit3_{size}_patch16_384" for size in ("small", "base", "large")),
        "deit3_huge_patch14_224",
    ),
    "1200ep_in1k": ("flexivit_small", "flexivit_base", "flexivit_large"),
    "r160_in1k": ("test_vit", "test_vit2"),
    "sbb_in1k": (
        *("vit_wee_patch16_reg1_gap_256", "vit_little_patch16_reg4_gap_256"),
        *("vit_medium_patch16_reg1_gap_256", "vit_betwixt_patch16_reg1_gap_256"),
    ),
    "sbb_in12k_ft_in1k": (
        "vit_little_patch16_reg1_gap_256",
        "vit_medium_patch16_reg4_gap_256",
    ),
    "sbb2_e200_in12k_ft_in1k": (
        *("vit_mediumd_patch16_reg4_gap_256", "vit_mediumd_patch16_reg4_gap_384"),
        *("vit_betwixt_patch16_reg4_gap_256", "vit_betwixt_patch16_reg4_gap_384"),
    ),
    "sbb_e250_in12k_ft_in1k": tuple(f"vit_so150m_patch16_reg4_gap_{side}" for side in (256, 384)),
    "v2_webli": tuple(
        f"vit_{model.replace('@', gap)}"
        for gap in ("siglip", "siglip_gap")
        for model in (
            *("base_patch32_@_256", "base_patch16_@_224", "base_patch16_@_256"),
            *("base_patch16_@_384", "base_patch16_@_512", "large_patch16_@_256"),
            *("large_patch16_@_384", "large_patch16_@_512", "so400m_patch14_@_224"),
            *("so400m_patch14_@_378", "so400m_patch16_@_256", "so400m_patch16_@_384"),
            *("so400m_patch16_@_512", "giantopt_patch16_@_256", "giantopt_patch16_@_384"),
        )
    ),
    "webli": ("vit_so400m_patch14_siglip_384", "vit_so400m_patch14_siglip_gap_384"),
}
TAGS = {model: tag for tag, models in MODELS.items() for model in models}


def hub_name(word: str) -> str | None:
    """The repository on the hub that one of timm's names means; None if it is not one.

    A name with a tag, MODEL.TAG, may be of any model that is named like a ViT of timm.
    """
    if word in TAGS:
        return f"timm/{word}.{TAGS[word]}"
    if word.split(".")[0] in TAGS or re.fullmatch(rf"({HEADS})_\w*patch\d\w*\.\w+", word):
        return f"timm/{word}"
    return None
