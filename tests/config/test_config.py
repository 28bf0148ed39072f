"""Configuration: what is merged, what is refused and with which line, and that every default is
read.
"""

import ast
import inspect
import json
import pathlib

import pytest
from conftest import ROOT, TINY

from vit_jax import config as configs
from vit_jax.config import meanings
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.train import workdir


def test_defaults_file_and_command_line_are_merged_in_this_order(tiny):
    config = configs.load(
        tiny, ["--config.optim.lr=2", "--config.model.scan=true", "--config.evals.val.every=3"]
    )
    assert config.optim.lr == 2.0 and isinstance(config.optim.lr, float)
    assert config.model.scan is True and config.model.width == 32 and config.model.posemb == "learn"
    assert config.evals.val.every == 3 and config.evals.val.data.crop == "weights"
    assert config.is_locked


def test_only_keys_of_the_chosen_branches_remain(tiny):
    config = configs.load(tiny, ["--config.optim.name=sgd"])
    assert "momentum" in config.optim and "b1" not in config.optim and "end_lr" not in config.optim
    assert "fraction" not in config.evals.val.data


def test_the_argument_behind_the_colon_reaches_get_config(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config(arg='x'):\n    return dict(init_from=arg)\n")
    assert configs.load(str(path)).init_from == "x"
    assert configs.load(f"{path}:B/16,a:b").init_from == "B/16,a:b"


def test_the_length_given_on_the_command_line_replaces_that_of_the_file(tiny):
    config = configs.load(tiny, ["--config.total_epochs=3"])
    assert config.total_epochs == 3.0 and config.total_steps == 0


BAD_ARGUMENTS = {
    "--config.foo=1": "config key foo is unknown on the command line: known are accum_steps, branch_from, ch",
    "--config.data.batchsize=1": "did you mean data.batch_size",
    "--config.batch_size=1": "did you mean data.batch_size",
    "--config.learning_rate=1": "did you mean optim.lr",
    "--config.optim.weight_decay=1": "did you mean optim.wd",
    "--config.num_epochs=1": "did you mean total_epochs",
    "--config.model.name=x": "did you mean model.variant",
    "--config.optim.name=adamw": "here it is adam, whose optim.wd is decoupled, as in AdamW",
    "--config.model.pool=avg": "here it is gap",
    "--init_form=B_16.npz": "argument --init_form is unknown on the command line: write "
    "--init_from=VALUE",
    "--work-dir=out": "write --workdir=VALUE",
    "--lr=0.1": "argument --lr is unknown on the command line: write --config.optim.lr=VALUE",
    "--batch-size=8": "write --config.data.batch_size=VALUE",
    "--pretrained=x": "write --init_from=VALUE",
    "--model=x": "write --config.model.variant=VALUE",
    "--config.model=x": "did you mean model.variant",
    "--foo": "argument --foo is unknown on the command line: write --config.KEY=VALUE",
    "--config.data.batch_size=1.5": "data.batch_size=1.5",
    "--config.model.scan=maybe": "model.scan=maybe",
    "--config.optim.lr=fast": "optim.lr=fast",
    "--config.optim.lr=nan": "optim.lr=nan is outside",
    "--config.optim.lr=-1": "optim.lr=-1.0 is outside",
    "--config.model.dropout=1": "model.dropout=1.0 is outside",
    "--config.loss=l2": "loss='l2' is not one of softmax_xent, sigmoid_xent",
    "--config.optim.name=lion": "optim.name='lion' is not one of adam, sgd",
    "--config.optim.momentum=0.5": "optim.momentum .* has no effect with optim.name=adam",
    "--config.optim.end_lr=0.5": "optim.end_lr .* has no effect with optim.schedule=cosine",
    "--config.evals.val.data.fraction=0.5": "fraction .* has no effect with evals.val.data.crop=weights",
    "--config.data.randaug_magnitude=5": "randaug_magnitude .* has no effect with data.randaug_layers=0",
    "--config.data.randaug_ops=timm": "data.randaug_ops .* has no effect with data.randaug_layers=0",
    "--config.data.randaug_std=0.5": "randaug_std .* has no effect with data.randaug_ops=big_vision",
    "--config.evals.other.every=3": "evals.other.every belongs to an evaluation that the config file does not have",
    "--config.accum_steps=5": "data.batch_size=64 is not divisible by accum_steps=5",
    "--config.accum_steps=0": "accum_steps=0 is outside",
    "--config.checkpoint.keep_best=top1": "keep_best='top1' is not a metric of evals: possible are eval/val/top1",
    "--config.optim.wd_mults=(('(',1.0),)": r"optim.wd_mults has '\(', which is not a valid regular",
    "--config.optim.lr_mults=(('a.**',1.0),)": r"optim.lr_mults has 'a\.\*\*', which is not a valid regular",
    "--config.optim.frozen=[": r"optim.frozen has '\[', which is not a valid regular",
    "--config.optim.lr_mults=(('a',0),)": "lr_mults has a number 0, not one from 1e-12",
    "--config.optim.wd_mults=(('a',-1.0),)": "wd_mults has a number -1.0, not one from 0",
    "--config.optim.lr_mults=(('a','b'),)": "lr_mults has a number 'b', not one",
    "--config.optim.lr_mults=('head/.*',3.0)": r"lr_mults expects a tuple of \(text, number\) pairs, got \('head",
    "--config.optim.stairs=((1,0.5),)": "optim.stairs .* has no effect with optim.schedule=cosine",
    "--config.optim.schedule=stair": r"optim.stairs=\(\) must hold",
    "--config.optim.nesterov=true": "optim.nesterov .* has no effect with optim.name=adam",
    "--config.optim.beta2_cap=0.9": "optim.beta2_cap .* has no effect with optim.name=adam",
    "--config.optim.clipping_threshold=1": "clipping_threshold .* has no effect with optim.name=adam",
    "--config.optim.power=2": "optim.power .* has no effect with optim.schedule=cosine",
    "--config.optim.shift=2": "optim.shift .* has no effect with optim.schedule=cosine",
    "--config.data={}": "config key data is unknown",
    "--config.data.subset=ten": "data.subset='ten' is neither a share such as 10% nor a number",
    "--config.data.repeats=3": "data.batch_size=64 is not divisible by data.repeats=3",
    "--config.data.name=mixture": "data.mixture is empty with data.name=mixture",
    "--config.data.mixture=(('digits',1.0),)": "data.mixture .* has no effect with data.name=digits",
    "--config.data.color_jitter=0.5": "data.color_jitter .* has no effect with data.three_augment=False",
    "--config.data.erase=2": "data.erase=2.0 is outside",
    "--config.data.method=cubic": "data.method='cubic' is not one of bilinear, bicubic",
    "--config.optim.lr": "optim.lr",
    "extra": "argument 'extra' is not understood",
}


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_clear_line(argument, tiny):
    with pytest.raises(UserError, match=BAD_ARGUMENTS[argument]):
        configs.load(tiny, [argument])


def test_what_others_call_a_key_is_not_a_key_itself():
    keys = [key for key in meanings.NAMES if not key.startswith("--")]
    assert all(configs.find(key.replace("NAME", "val")) for key in keys)
    words = {key.rpartition(".")[2] for key in configs.KEYS}
    assert words & meanings.KEYS_MEANT.keys() == {"steps", "num_steps"}  # of spikes, profile
    for key, values in meanings.VALUES.items():
        assert not values.keys() & set(configs.KEYS[key].choices)


@pytest.mark.parametrize(
    ("name", "variant"),
    {
        "vit_base_patch16_224.augreg_in21k": "B/16 with image_size=224",
        "google/vit-large-patch32-384": "L/32 with image_size=384",
        "vit_b_16": "B/16",
        "ViT-g/14": "g/14",
        "resnet50": "",
        "efficientnet_b0": "",
        "swin_base_patch4_window7_224": "",
        "mixer_b16_224": "",
    }.items(),
)
def test_models_by_the_names_of_others(name, variant):
    assert variants.meant(name) == (f"; here it is {variant}" if variant else "")


@pytest.mark.parametrize(
    "mixture, more, message",
    [
        ("(('digits', -1.0),)", [], "data.mixture has a number -1.0"),
        (
            "(('digits', 1.0), ('digits@val', 1e-9))",
            [],
            "gives digits@val less than 1/10,000 of the weight",
        ),
        (
            "(('digits', 1.0),)",
            ["--config.data.subset=10%"],
            "data.subset has no effect on a mixture",
        ),
        ("('digits', 1.0)", [], "expects a tuple of"),
        ("(('digits', 1.0),)", [], "evals.val.data.name is empty: name its data set"),
    ],
)
def test_wrong_mixtures_are_named(mixture, more, message, tiny):
    with pytest.raises(UserError, match=message):
        configs.load(
            tiny, ["--config.data.name=mixture", f"--config.data.mixture={mixture}", *more]
        )


def test_magnitudes_of_timm_end_at_ten(tiny):
    flags = ["--config.data.randaug_layers=2", "--config.data.randaug_ops=timm"]
    configs.load(tiny, [*flags, "--config.data.randaug_magnitude=10"])
    with pytest.raises(UserError, match=r"randaug_magnitude=15\.0 is more than 10, to which data"):
        configs.load(tiny, [*flags, "--config.data.randaug_magnitude=15"])


def test_a_key_of_dino_may_need_another_one(tiny):
    flags = ["objective=dino", "evals={}", "dino.ibot=False", "dino.shared_head=True"]
    with pytest.raises(UserError, match=r"config key dino.shared_head"):
        configs.load(tiny, [f"--config.{flag}" for flag in flags])


def test_both_lengths_at_once_are_an_error(tiny):
    with pytest.raises(UserError, match=r"total_steps=5 and total_epochs=1\.0 are both set"):
        configs.load(tiny, ["--config.total_steps=5", "--config.total_epochs=1"])


def test_the_decay_of_lars_does_not_rise(tiny):
    with pytest.raises(UserError, match=r"wd_end=0\.1 has no effect with optim\.name=lars"):
        configs.load(tiny, ["--config.optim.name=lars", "--config.optim.wd_end=0.1"])


@pytest.mark.parametrize("stairs", ["((5,0.5),(5,0.1))", "((9,0.5),(5,0.1))", "((-1,0.5),)"])
def test_stairs_must_ascend(stairs, tiny):
    with pytest.raises(
        UserError, match=r"optim\.stairs=.* must hold \(step, factor\) pairs with ascending steps"
    ):
        configs.load(tiny, ["--config.optim.schedule=stair", f"--config.optim.stairs={stairs}"])


def test_pairs_are_the_same_from_the_command_line_a_file_and_json(tiny, tmp_path):
    on_line = configs.load(tiny, ["--config.optim.lr_mults=(('head/.*',3),('.*',0.5))"])
    path = tmp_path / "lists.py"
    path.write_text(TINY.replace("lr=1e-3", "lr=1e-3, lr_mults=[['head/.*', 3], ['.*', 0.5]]", 1))
    in_file = configs.load(str(path))
    for config in (on_line, in_file):
        assert config.optim.lr_mults == (("head/.*", 3.0), (".*", 0.5))
        assert isinstance(config.optim.lr_mults[0][1], float)
        assert workdir.differences(config, json.loads(json.dumps(configs.to_json(on_line)))) == []
    assert workdir.differences(configs.load(tiny), configs.to_json(on_line)) == [
        "optim.lr_mults: (('head/.*', 3.0), ('.*', 0.5)) -> ()"
    ]


def test_lamb_has_keys_of_adam_but_no_choice_of_decay(tiny):
    config = configs.load(tiny, ["--config.optim.name=lamb", "--config.optim.eps=1e-6"])
    assert config.optim.eps == 1e-6 and config.optim.b1 == 0.9 and "wd_times_lr" not in config.optim
    with pytest.raises(
        UserError, match=r"optim\.wd_times_lr .* has no effect with optim\.name=lamb"
    ):
        configs.load(tiny, ["--config.optim.name=lamb", "--config.optim.wd_times_lr=false"])


def test_a_smoothed_label_has_no_classes_that_are_not_there(tiny):
    with pytest.raises(UserError, match=r"label_smoothing=0\.1 gives every class a part"):
        configs.load(tiny, ["--config.loss=multilabel_xent", "--config.label_smoothing=0.1"])


BAD_FILES = {
    "config.total_steps = 12": ("config.total_steps = 1.5", "total_steps expects int, got 1.5"),
    "config.image_size = 8": (
        "config.imagesize = 8",
        "imagesize is unknown .* did you mean image_size",
    ),
    "config.log_every = 1": ("config.log_every = None", "log_every expects int, got None"),
    "lr=1e-3": ("lr='1e-3'", "optim.lr expects float, got '1e-3'"),
    "warmup_steps=2": ("momentum=0.9", "optim.momentum in the config file has no effect"),
    "every=6": ("cadence=6", "evals.val.cadence is unknown"),
    'split="val"': (
        'split="val", crop="inception"',
        "crop='inception' is not one of resize, central",
    ),
    "return config": ("return 1 / 0", "get_config fails: ZeroDivisionError"),
    "import ml_collections": ("import no_such_module", "fails to run: ModuleNotFoundError"),
    "def get_config": ("def other", "has no function get_config"),
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files_end_in_one_clear_line(text, tmp_path):
    replacement, message = BAD_FILES[text]
    path = tmp_path / "bad.py"
    path.write_text(TINY.replace(text, replacement, 1))
    with pytest.raises(UserError, match=message):
        configs.load(str(path))


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"config file nowhere/c.py does not exist"):
        configs.load("nowhere/c.py:B/16")


def test_runs_of_versions_without_a_key_are_continued(tiny):
    saved = configs.to_json(configs.load(tiny))
    del saved["data"]["exif_rotation"]
    for value in ("True", "False"):
        config = configs.load(tiny, [f"--config.data.exif_rotation={value}"])
        assert workdir.differences(config, saved) == []
    assert workdir.differences(config, configs.to_json(configs.load(tiny))) == [
        "data.exif_rotation: True -> False"
    ]


def test_json_round_trip_shows_no_difference_and_changes_are_told(tiny):
    config = configs.load(tiny)
    saved = configs.to_json(config)
    assert workdir.differences(config, saved) == []
    free = [
        "--config.accum_steps=2",
        "--config.mesh.data=4",
        "--config.model.remat=full",
        "--config.evals.val.every=1",
    ]
    assert workdir.differences(configs.load(tiny, free), saved) == []
    assert workdir.differences(configs.load(tiny, ["--config.seed=1"]), saved) == ["seed: 0 -> 1"]
    other = workdir.differences(configs.load(tiny, ["--config.optim.name=sgd"]), saved)
    assert "optim.momentum: (unset) -> 0.9" in other and "optim.b1: 0.9 -> (unset)" in other


def attribute_names(path: pathlib.Path) -> set[str]:
    """Attribute names that a file reads, and strings, by which some keys are looked up."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_default_is_read_somewhere():
    code = [path for path in (ROOT / "vit_jax").rglob("*.py") if path.parent.name != "config"]
    read = set.union(*map(attribute_names, code))
    # Passed on as a whole: config.model to the model's constructor, config.mesh to make_mesh, config.profile to the window.
    from vit_jax.models.vit import VisionTransformer

    read |= set(VisionTransformer.__dataclass_fields__)
    from vit_jax.distributed.mesh import AXES

    read |= set(AXES)
    from vit_jax.train.timer import ProfilerWindow

    read |= set(inspect.signature(ProfilerWindow).parameters)
    unread = [key for key in configs.known_keys() if key.split(".")[-1] not in read]
    assert not unread


def test_declarations_name_known_keys_and_defaults_pass_their_own_checks():
    for name, key in configs.KEYS.items():
        assert set(key.only_if) <= set(configs.KEYS), name
        assert key.check(key.default) == key.default, name
        assert key.meaning, name


def test_choices_are_the_keys_of_the_tables_that_carry_them_out():
    from vit_jax.evaluate import suite
    from vit_jax.models import encoder, losses, mlp, posemb, vit
    from vit_jax.train import optim, schedules

    tables = {
        "loss": losses.LOSSES,
        "optim.name": optim.OPTIMIZERS,
        "optim.schedule": schedules.SCHEDULES,
        "evals.*.type": suite.ON_BATCHES | suite.ON_FEATURES,
        "model.remat": encoder.REMAT_POLICIES,
        "model.posemb": posemb.KINDS,
        "model.posemb_at": posemb.PLACES,
        "model.mlp": ["", *mlp.MLPS],
        "model.gelu": mlp.GELUS,
        "model.droppath_shape": encoder.DROPPATH_SHAPES,
        "model.weight_init": vit.WEIGHT_INITS,
    }
    for key, table in tables.items():
        assert set(configs.KEYS[key].choices) == set(table), key
    assert set(configs.KEYS["model.pool"].choices) <= set(vit.POOLS)


def test_an_evaluation_of_defaults_alone_is_kept(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n    return dict(evals=dict(test={}))\n")
    assert configs.load(str(path)).evals.test.data.split == "test"


def test_the_evaluations_of_a_file_may_be_left_out(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n    return dict(evals=dict(test={}, val={}))\n")
    assert set(configs.load(str(path)).evals) == {"test", "val"}
    assert not configs.load(str(path), ["--config.evals={}", "--config.seed=3"]).evals
    assert not configs.load_in_python(str(path), {"evals": {}, "seed": 3}).evals
    with pytest.raises(
        UserError, match=r"evals.val.every belongs to an evaluation that the config"
    ):
        configs.load(str(path), ["--config.evals={}", "--config.evals.val.every=1"])


@pytest.mark.parametrize("result", ["None", "[]", "3"])
def test_a_config_that_is_no_dict_is_named(result, tmp_path):
    path = tmp_path / "c.py"
    path.write_text(f"def get_config():\n    return {result}\n")
    with pytest.raises(UserError, match="it must return a dict"):
        configs.load(str(path))


def test_a_run_may_be_continued_with_other_values_of_these_keys_alone():
    free = {name for name, key in configs.KEYS.items() if key.resume}
    groups = {"mesh", "checkpoint", "spikes", "evals", "profile"}
    assert {name for name in free if name.split(".")[0] not in groups} == {
        *("accum_steps", "log_every", "pictures_every", "max_skipped", "topology", "flush_every_s"),
        "trackers",
        *("model.remat", "model.remat_names", "model.scan"),
        *("data.data_dir", "data.on_corrupt", "data.threads"),
        *("data.prefetch", "data.eval_cache_gib"),
        *("distill.teacher", "distill.teacher_variant"),  # whose weights must stay the same
    }
    assert {name for name in configs.KEYS if name.split(".")[0] in groups} <= free
