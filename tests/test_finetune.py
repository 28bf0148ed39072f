"""The choice of the learning rate: on what is held out, kept, and followed by a run on everything."""

import json

import pytest
from conftest import last_error, metric_lines

from vit_jax import finetune
from vit_jax.checkpoints import read as checkpoint
from vit_jax.errors import NegativeResult
from vit_jax.weights import load as pretrained


def run(tiny, workdir, *arguments) -> int:
    return finetune.main(
        [f"--config={tiny}", f"--workdir={workdir}", "--config.total_steps=4", *arguments]
    )


@pytest.mark.slow
def test_the_best_learning_rate_trains_on_everything_and_what_was_tried_is_kept(
    tiny, tmp_path, monkeypatch, capsys
):
    real, tries, out = finetune.run, [], tmp_path / "found.json"

    def run_once(config, folder):
        tries.append(folder.name)
        if len(tries) == 2:
            raise KeyboardInterrupt
        return real(config, folder)

    monkeypatch.setattr(finetune, "run", run_once)
    # Without clipping by sgd, the highest is not finite.
    flags = [
        "--lrs=0.01,900000,0.000001",
        "--held_out=20%",
        f"--json={out}",
        "--config.optim.name=sgd",
    ]
    flags += [
        "--config.optim.grad_clip_norm=0.0",
        "--config.max_skipped=1",
        "--config.optim.warmup_steps=0",
    ]
    assert run(tiny, tmp_path / "run", *flags) == 130
    assert run(tiny, tmp_path / "run", *flags) == 0
    assert tries == ["lr_1e-06", "lr_0.01", "lr_0.01", "lr_900000", "final"]
    found = json.loads(out.read_text())
    tried = {float(lr): top1 for lr, top1 in found["tried"].items()}
    assert tried.keys() == {1e-6, 0.01, 9e5} and tried.pop(9e5) is None
    assert found["lr"] == max(tried, key=tried.get)
    for lr, top1 in tried.items():
        folder = tmp_path / f"run/lr_{lr:g}"
        config = json.loads((folder / "config.json").read_text())["config"]
        assert config["data"]["subset"] == "80%" and config["optim"]["lr"] == lr
        assert json.loads((folder / "goodput.json").read_text())["records"][-1]["last_step"] == 4
        last = metric_lines(folder)[-1]
        assert last["eval/held_out/top1"] == top1 and last["eval/held_out/count"] == 215
    final = checkpoint.read_meta(checkpoint.find(tmp_path / "run/final"))["config"]
    assert (final["optim"]["lr"], final["data"]["subset"]) == (found["lr"], "")
    assert found["final"]["eval/val/count"] == 360
    assert f"{found['lr']:g}, all of train" in capsys.readouterr().out
    final = tmp_path / "run/final/checkpoints"
    assert checkpoint.find(tmp_path / "run").parent == final
    assert pretrained.read(tmp_path / "run").fields["image_size"] == (8, 8)
    assert run(tiny, tmp_path / "run", *flags, "--config.mixup=0.5") == 2
    assert "another config" in last_error(capsys)
    assert (
        run(tiny, tmp_path / "run", *flags, "--config.evals.val.data.split=val[:50%]") == 0
    )  # not of the tries
    assert run(tiny, tmp_path / "run", *flags, "--config.evals.val.data.crop=central") == 2
    assert "another config" in last_error(capsys)
    (tmp_path / "run/finetune.json").write_text("{")
    worse = min(tried, key=tried.get)
    assert run(tiny, tmp_path / "run", f"--lrs={worse}", *flags[1:]) == 2
    assert (
        f"was trained with the learning rate {found['lr']:g}, but {worse:g} is better"
        in last_error(capsys)
    )


def test_no_learning_rate_may_be_left():
    with pytest.raises(NegativeResult, match="with any of the learning rates"):
        finetune.best({0.1: None})


MISTAKES = {
    "--lrs=a,b must be positive numbers": ["--lrs=a,b"],
    "--lrs=0.1,-1 must be": ["--lrs=0.1,-1"],
    "--held_out=200% must be above 0% and below 100%": ["--held_out=200%"],
    "--held_out=5 must be above 0% and below 100%": ["--held_out=5"],
    "data.subset is needed to hold a part of the data out": ["--config.data.subset=10%"],
    "has no classification": ["--config.evals.val.type=knn"],
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_are_one_line(tiny, tmp_path, capsys, says):
    assert run(tiny, tmp_path / "new", *MISTAKES[says]) == 2
    assert says in last_error(capsys)
    assert not (tmp_path / "new").exists()
