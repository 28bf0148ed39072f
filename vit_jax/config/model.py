"""The keys of `config.model`."""

from vit_jax.config.key import DROP, DTYPES, Key, together

key = Key
DEPTH = (0, 4096)
WIDTH = (0, 2**20)
CLASSES = (0, 10**8)

# fmt: off
OF_WEIGHTS = together(of_weights=True, keys=dict(
    variant=key("B/16", "size and patch size, with a ResNet stem as in R50+B/16",
                own=("num_classes", "image_size")),
    width=key(0, "embedding width; 0: the variant's", within=WIDTH),
    depth=key(0, "encoder blocks; 0: the variant's", within=DEPTH),
    mlp_dim=key(0, "width of the MLP; 0: the variant's", within=WIDTH),
    num_heads=key(0, "attention heads; 0: the variant's", within=WIDTH),
    pool=key("tok", "what the head reads", {
        "tok": "class token", "gap": "mean of the patch tokens", "map": "attention pooling",
        "tok_gap": "class token and mean, side by side"}),
    class_token=key(False, "have a class token even if `pool` does not read it", like_weights=True),
    distilled=key(False, "DeiT's distillation token and second head", like_weights=True),
    registers=key(0, "further tokens that no head reads", within=WIDTH, like_weights=True),
    posemb=key("learn", "position embedding", {
        "learn": "one row per token", "learn2d": "by row and column", "relative": "by distance",
        "sincos2d": "fixed sin-cos", "none": ""}, like_weights=True),
    posemb_at=key("stem", "where it is added", {
        "stem": "once, before the encoder", "every": "each block has its own",
        "shared": "each block adds the same"},
        only_if={"model.posemb": ("learn", "learn2d")}, like_weights=True),
    fc_norm=key(False, "the final LayerNorm comes after the pooling"),
    mlp=key("", "layers of the MLP", {
        "": "the variant's", "gelu": "two, with a GELU between them",
        "swiglu": "two and a gate, as in DINOv2's giant"}),
    gelu=key("tanh", "form of GELU", {
        "tanh": "the approximation of the published code",
        "erf": "exact, as in timm (1.0.31) and Hugging Face"}, like_weights=True),
    ln_eps=key(1e-6, "epsilon of LayerNorm", like_weights=True),
    mean=key((0.5, 0.5, 0.5), "of the pixels, 0 to 1, as the model expects", like_weights=True),
    std=key((0.5, 0.5, 0.5), "standard deviation of the pixels", like_weights=True),
    layer_scale=key(0.0, "initial value of LayerScale, a learned factor per channel of each "
                    "residual branch; 0: none"),
))

MODEL = OF_WEIGHTS | dict(
    num_classes=key(0, "outputs of the head; 0: as many as the data set has", within=CLASSES),
    pre_logits=key(False, "a tanh layer before the head, as wide as the model"),
    head_bias=key(0.0, "initial bias of the head", within=(-1e6, 1e6)),
    head_std=key(0.0, "standard deviation of the initial head; 0: zeros, or 0.02 with "
                 "weight_init=timm"),
)
MODEL = together(state=True, keys=MODEL) | dict(
    dropout=key(0.0, "rate after the position embedding, after attention, and in the MLP",
                within=DROP, train_only=True),
    droppath=key(0.0, "stochastic depth of the last block", within=DROP, train_only=True),
    droppath_shape=key("linear", "stochastic depth by block", {
        "linear": "from 0 in the first block", "constant": "the same in all"}, train_only=True),
    weight_init=key("jax", "how the parameters of a ViT start", {
        "jax": "Xavier uniform, as in the published code", "timm": "normal with 0.02, as in timm"},
        train_only=True, vtab=False),
    scan=key(False, "one compiled block for all layers: compiles faster. With adafactor it can't "
             "change on resume", resume=True),
    remat=key("none", "what is saved for the backward pass; the rest is computed again", {
        "none": "the compiler decides", "names": "the results in remat_names",
        "dots": "results of matrix products with parameters", "full": "only the input of a block"},
        resume=True, train_only=True),
    remat_names=key(("query", "key", "value", "attended", "hidden"), "the "
                    "results that are saved: the three projections, attention before its output "
                    "projection, the first layer of the MLP",
                    only_if={"model.remat": ("names",)}, resume=True, train_only=True),
    dtype=key("float32", "of activations and matrix products", DTYPES),
    softmax_dtype=key("float32", "of the softmax of einsum; the other ways have float32", DTYPES),
    attention=key("auto", "how attention is computed", {
        "auto": "by tokens, platform and dtype",
        "einsum": "memory grows with the square of the tokens",
        "short": "TPU, short sequences: docs/models.md",
        "splash": "TPU", "cudnn": "NVIDIA", "blockwise": "any platform"}),
)
# fmt: on
