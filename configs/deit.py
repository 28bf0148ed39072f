"""DeiT, arXiv 2012.12877: ViTs on ImageNet alone, with or without a teacher.

    python -m vit_jax.train --config=configs/deit.py:B/16 --workdir=gs://BUCKET/b16
    python -m vit_jax.train --config=configs/deit.py:B/16,R50x1 --workdir=gs://BUCKET/b16_distilled

The argument is VARIANT[,TEACHER]: Ti/16, S/16 or B/16. With a teacher, the model has the
distillation token, which learns the teacher's likeliest class. Teachers, all at 224:
- R50x1: BiT ResNet-50, itself distilled from the next (arXiv 2106.05237), 82.8 %
- R152x2: BiT-M ResNet-152, twice as wide, 83.0 %
- B/16: ViT of AugReg, fine-tuned from ImageNet-21k, 84.5 %
All three saw ImageNet-21k, themselves or through their own teacher. Any other weights of the 1,000
classes: --config.distill.teacher=WEIGHTS --config.distill.teacher_variant=''. The recipe is that of
table 9 of the paper and of the authors' code.

Expected validation top-1, table 3 of the paper. It was made with a RegNetY-16GF (82.9 %, of
ImageNet alone) as the teacher, which is not an architecture here; numbers for the teachers above
are not published. Convolutional teachers are better than a ViT in table 2.

                                      Ti/16    S/16    B/16
    without a teacher                 72.2 %  79.8 %  81.8 %
    soft targets, no token            72.2 %  79.8 %  81.8 %
    hard targets, no token            74.3 %  80.9 %  83.0 %
    hard targets, token: this recipe  74.5 %  81.2 %  83.4 %

For hard targets without the token, add --config.model.distilled=False; for soft ones, also
--config.distill.kind=soft --config.distill.weight=0.1.

Cost: Ti/16 2.9e18 FLOP, S/16 1.1e19, B/16 4.1e19; as a teacher, R50x1 adds 3.1e18, R152x2 3.5e19
and B/16 1.4e19, all of them 1/k of that with --config.distill.teacher_every=k.

Differences from theirs:
- The batch size with three copies of each image is 1008 (336 images), not 1024.
- RandAugment is big_vision's with two operations of magnitude 9. Theirs is timm's, which costs more
  on TPUs: --config.data.randaug_ops=timm_inc --config.data.randaug_std=0.5.
- Mixup and CutMix draw one value and pair images over the whole batch, not over the 64 of each GPU.
- The learning rate changes with every step, from 0 and to 0, not with every epoch from 1e-6 and to
  1e-5, see configs/deit3.py.
- The class token has a row in the position embedding, so the sum of both is learned twice as fast.
- Kernels have Xavier initialisation; theirs are normal with a standard deviation of 0.02, as only
  the heads are here, unless --config.model.weight_init=timm.
- bfloat16, also in the residual stream and the teacher; theirs is float16 in part.
- Both heads are evaluated by the mean of their logits, as in their code; the paper adds softmaxes.
- Evaluation images are resized by area, not bicubically.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

VARIANTS = ("Ti/16", "S/16", "B/16")
# Variant -> published weights of ImageNet's 1,000 classes at 224 pixels.
TEACHERS = {
    "R50x1": "bit_models/distill/R50x1_224",
    "R152x2": "bit_models/distill/R152x2_T_224",
    "B/16": "augreg/B_16-224",
}
WARMUP_EPOCHS = 5


def get_config(arg="B/16"):
    """`arg`: VARIANT[,TEACHER]."""
    variant, _, teacher = arg.partition(",")
    if variant not in VARIANTS or (teacher and teacher not in TEACHERS):
        raise UserError(
            f"configs/deit.py has no recipe for {arg}: write VARIANT[,TEACHER], with VARIANT one "
            f"of {', '.join(VARIANTS)} and TEACHER one of {', '.join(TEACHERS)}"
        )
    config = ml_collections.ConfigDict()
    config.total_epochs = 300  # counting all three copies: 100 passes over the images
    config.image_size = 224
    config.mixup = 0.8
    config.cutmix = 1.0
    config.label_smoothing = 0.1
    config.data = dict(
        name="imagenet2012", split="train", batch_size=1008, repeats=3, crop="torchvision"
    )
    config.data.update(area_min=0.08, method="bicubic", flip=True, erase=0.25)
    config.data.update(randaug_layers=2, randaug_magnitude=9)
    config.model = dict(variant=variant, pool="tok", gelu="erf", head_std=0.02, dtype="bfloat16")
    config.model.update(droppath=0.1, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    # 5e-4 x batch / 512, for their batch of 1024.
    config.optim = dict(name="adam", lr=1e-3, wd=0.05, schedule="cosine", b1=0.9, b2=0.999)
    examples = CATALOG["imagenet2012"].examples["train"]
    config.optim.warmup_steps = round(WARMUP_EPOCHS * examples / config.data.batch_size)
    if teacher:
        config.objective = "distill"
        config.distill = dict(teacher=TEACHERS[teacher], teacher_variant=teacher, teacher_size=224)
        config.distill.update(kind="hard", weight=0.5)
        config.model.distilled = True
    config.evals = dict(
        val=dict(every=2500, data=dict(split="validation", crop="central", fraction=0.875))
    )
    config.checkpoint = dict(every=1000)
    return config
