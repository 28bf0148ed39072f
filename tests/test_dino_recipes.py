"""The recipes of DINO against what the authors publish."""

import pytest
from conftest import ROOT

from vit_jax import config as configs
from vit_jax.errors import UserError
from vit_jax.train import experiment
from vit_jax.train.objectives.make import make_objective

FILE = str(ROOT / "configs/dino.py")
# The defaults of main_dino.py (facebookresearch/dino) with --nproc_per_node=8, args.txt of the
# published B/16, and dinov2/configs/ssl_default_config.yaml with 32 GPUs: batch, epochs, learning
# rate, momentum, clipping, temperature, epochs of its warm-up and of the frozen layer, crops.
PUBLISHED = {
    "s16": (512, 100, 0.001, 0.996, 3.0, 0.04, 0, 1, (0.4, 1.0), (0.05, 0.4), 8),
    "b16": (1024, 400, 0.003, 0.996, 0.3, 0.07, 50, 3, (0.25, 1.0), (0.05, 0.25), 10),
    "l16": (2048, 100, 0.005657, 0.992, 3.0, 0.07, 30, 1, (0.32, 1.0), (0.05, 0.32), 8),
}
COST = {"s16": "1.5e19", "b16": "2.4e20", "l16": "4.0e20"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_the_published_ones(name):
    batch, epochs, lr, momentum, clip, temperature, warmup, freeze, *crops = PUBLISHED[name]
    config = configs.load(f"{FILE}:{name}", [])
    epoch = 1250 if name == "l16" else 1_281_167 // batch
    optim = config.optim
    assert (config.data.batch_size, config.total_steps) == (batch, epochs * epoch)
    assert optim.lr == pytest.approx(lr, rel=1e-4)
    assert (optim.ema_decay, optim.grad_clip_norm, optim.warmup_steps) == (
        momentum,
        clip,
        10 * epoch,
    )
    assert (optim.wd, optim.wd_end, optim.b1, optim.b2) == (0.04, 0.4, 0.9, 0.999)
    assert config.dino.teacher_temperature == temperature
    assert config.dino.temperature_warmup_steps == warmup * epoch
    assert config.dino.freeze_last_layer == freeze * epoch
    views = config.data.views
    assert [views.global_area, views.local_area, views.local_count] == crops
    assert (config.dino.prototypes, config.dino.ibot) == (65_536, name == "l16")


@pytest.mark.parametrize("name", COST)
def test_costs(name):
    config = configs.load(f"{FILE}:{name}", [])
    words = " ".join(configs.import_file(FILE).__doc__.split())
    assert f"{name} {COST[name]}" in words.partition("Cost")[2]
    model = experiment.make_model(config, 0)
    flops = make_objective(config, model, config.total_steps).train_flops
    total = flops * config.data.batch_size * config.total_steps
    assert f"{total:.1e}".replace("+", "") == COST[name]


def test_unknown_recipe():
    with pytest.raises(UserError, match="no recipe h14: use one of s16, b16, l16"):
        configs.load(f"{FILE}:h14", [])
