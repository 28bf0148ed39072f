"""Arguments in timm's own table of models, as far as arrays do not show them: a config.json has
only those that differ from it.
"""

import re

HEADS = dict(tiny=3, xsmall=4, wee=4, little=5, small=6, medium=8, mediumd=8)
HEADS |= dict(betwixt=10, base=12, so150m2=13, so150m=14, large=16, so400m=16)
HEADS |= dict(huge=16, giant=16, giantopt=16, gigantic=16)
ENTRIES = [
    (r"vit_base_patch32_siglip(_gap)?_256", dict(act_layer="gelu_tanh")),
    (r"vit_large_patch16_siglip(_gap)?_512", dict(act_layer="gelu_tanh")),
    (r"vit_(so400m_patch16|giantopt_patch\d+)_siglip.*", dict(act_layer="gelu_tanh")),
    (r"vit_base_patch16_gap_224", dict(num_heads=16)),
    (r"vit_base_patch16_224_miil", dict(qkv_bias=False)),
    (r"vit_.*_clip_.*", dict(pre_norm=True)),
    (r"vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)", dict(num_heads=24)),
    (r"deit3_.*", dict(init_values=1e-6, no_embed_class=True)),
    (r"test_vit\d?", dict(num_heads=2)),
    (r"test_vit3", dict(num_heads=3, pool_include_prefix=True)),
]


def entry_args(architecture: str) -> dict:
    """Arguments of one entry of timm's table of models."""
    args = {}
    size = re.match(r"(?:vit|deit3?|flexivit|eva)_([a-z0-9]+)", architecture)
    if size and size[1] in HEADS:
        args["num_heads"] = HEADS[size[1]]
    registers = re.search(r"_reg(\d+)_", architecture)
    if registers:
        args["reg_tokens"] = int(registers[1])
    for pattern, more in ENTRIES:
        if re.fullmatch(pattern, architecture):
            args |= more
    return args
