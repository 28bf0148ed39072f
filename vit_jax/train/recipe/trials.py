"""The configs of the trial runs that choose the learning rate."""

from vit_jax.errors import UserError
from vit_jax.train.recipe import choose

HELD_OUT = "held_out"  # name of the evaluation that decides
KEY = f"eval/{HELD_OUT}/top1"


def part_of(config, lr: float, share: str):
    """The config of a trial run with this learning rate.

    It trains on `share` of the data, and is evaluated at its end on the rest, with the settings of
    the first evaluation.
    """
    classifications = [entry for entry in config.evals.values() if entry.type == "classification"]
    if not classifications:
        raise UserError(
            "config.evals has no classification, which says how images are evaluated: add one"
        )
    if config.data.subset or config.data.name == "mixture":
        raise UserError(
            "data.subset is needed to hold a part of the data out, so it can't be set, and the "
            "data can't be a mixture: change one of them"
        )
    trial = config.copy_and_resolve_references()
    with trial.unlocked():
        trial.optim.lr = lr
        trial.data.subset = share
        trial.evals = {HELD_OUT: classifications[0].copy_and_resolve_references()}
        trial.evals[HELD_OUT].every = 0
        trial.evals[HELD_OUT].data.update(rest=True, split=config.data.split, name="", data_dir="")
    return without_checkpoints(trial)


def without_checkpoints(trial):
    """A config whose run is saved only at its end, which is the last step, and draws nothing. After
    a loss spike it can't go back.
    """
    with trial.unlocked():
        trial.checkpoint.every = 0
        trial.checkpoint.keep_best = ""
        trial.early_stopping = 0
        trial.spikes.factor = 0.0
        trial.pictures_every = 0
    return trial.lock()


def shorter(config, lr: float, steps: int):
    """The config of a shorter trial run, of a recipe that holds out a part by itself.

    Args:
      steps: of the final run.
    """
    trial = config.copy_and_resolve_references()
    total = choose.trial_steps(steps)
    with trial.unlocked():
        trial.optim.lr = lr
        trial.total_steps = total
        trial.total_epochs = 0.0
        for key in {"warmup_steps", "cooldown_steps"}.intersection(config.optim):
            trial.optim[key] = config.optim[key] * total // steps
        if "stairs" in config.optim:
            stairs = ((step * total // steps, factor) for step, factor in config.optim.stairs)
            trial.optim.stairs = tuple(stairs)
        trial.evals = {HELD_OUT: config.evals[HELD_OUT].copy_and_resolve_references()}
        trial.evals[HELD_OUT].every = 0
    return without_checkpoints(trial)
