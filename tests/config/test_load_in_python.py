"""Configs from Python: the same as from the command line, with the same errors."""

import pathlib

import pytest
from conftest import ROOT

import vit_jax
from vit_jax import config as configs
from vit_jax.errors import UserError

RECIPES = sorted(str(path) for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")


def test_overrides_are_those_of_the_command_line(tiny):
    arguments = ["--config.optim.name=sgd", "--config.evals.val.every=3", "--config.seed=7"]
    wanted = configs.load(tiny, arguments)
    nested = dict(optim=dict(name="sgd"), evals=dict(val=dict(every=3)), seed=7)
    flat = {"optim.name": "sgd", "evals.val.every": 3, "seed": 7}
    for overrides in (nested, flat):
        config = vit_jax.load_config(pathlib.Path(tiny), overrides)
        assert config.to_dict() == wanted.to_dict() and config.is_locked


def test_a_loaded_config_may_be_changed_and_loaded_again(tiny):
    config = vit_jax.load_config(tiny)
    assert vit_jax.load_config(config).to_dict() == configs.load(tiny).to_dict()
    config.optim.lr = 0.25
    assert vit_jax.load_config(config).optim.lr == 0.25
    other = vit_jax.load_config(config, {"optim.name": "sgd", "total_epochs": 2.0})
    assert (
        other.to_dict()
        == configs.load(
            tiny, ["--config.optim.lr=0.25", "--config.optim.name=sgd", "--config.total_epochs=2"]
        ).to_dict()
    )
    config.optim.lr = -1.0
    with pytest.raises(UserError, match=r"config key optim.lr=-1.0 is outside"):
        vit_jax.load_config(config)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: pathlib.Path(path).name)
def test_every_recipe_survives_a_second_loading(path):
    try:
        config = vit_jax.load_config(path)
    except UserError:
        pytest.skip("needs an argument")
    assert vit_jax.load_config(config).to_dict() == config.to_dict()


def test_a_dict_has_the_keys_that_a_file_may_set():
    keys = dict(total_steps=3, image_size=8, evals=dict(val={}), data=dict(name="digits"))
    config = vit_jax.load_config(keys)
    assert config.total_steps == 3 and config.evals.val.type == "classification"
    added = vit_jax.load_config(config, {"evals.probe.type": "linear_probe"})
    assert added.evals.probe.type == "linear_probe" and added.evals.val.type == "classification"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.learning_rate": 1.0}, r"optim.learning_rate is unknown in the overrides"),
        ({"optim": {"lr": "fast"}}, r"optim.lr expects float, got 'fast', in the overrides"),
        ({"optim.momentum": 0.9}, r"optim.momentum in the overrides has no effect with optim.name"),
        ({"total_steps": 3, "total_epochs": 1.0}, "are both set"),
    ],
)
def test_mistakes_are_named(overrides, message, tiny):
    with pytest.raises(UserError, match=message):
        vit_jax.load_config(tiny, overrides)


def test_what_is_no_config_is_named(tiny):
    with pytest.raises(UserError, match=r"nowhere.py does not exist"):
        vit_jax.load_config("nowhere.py")
    with pytest.raises(UserError, match="of type int can't be read: give FILE"):
        vit_jax.load_config(3)
    with pytest.raises(UserError, match="overrides of type list can't be read: give a dict"):
        vit_jax.load_config(tiny, ["--config.seed=3"])


def test_a_loaded_config_may_get_weights_which_then_decide_about_the_model(tiny):
    loaded = vit_jax.load_config(tiny)
    again = vit_jax.load_config(loaded, {"init_from": "w.npz"})
    assert again.model.gelu is None and again.model.width == 32 and again.model.pool == "gap"
    assert vit_jax.load_config(again) == again
    assert vit_jax.load_config(loaded) == loaded
