"""A whole run by one call, for `vit_jax.fit` and for commands that have several."""

from etils import epath

from vit_jax import cli
from vit_jax.distributed import preemption, runtime
from vit_jax.train import goodput, loop, metrics, workdir

RECOVERY = "saved checkpoints are intact, and the same call continues from the last one"


def run(config, folder: epath.Path) -> dict[str, float]:
    """Trains in `folder`, or continues there; returns the last value of every metric."""
    folder = workdir.make(str(folder))
    with cli.logging_to(folder, config.flush_every_s) as files:
        loop.train(config, folder, files)
        lines = metrics.read_lines(files.path("metrics.jsonl"))
    return {key: value for line in lines for key, value in line.items()}


def fit(config, folder: str) -> dict[str, float]:
    """See `vit_jax.fit`; `config`: a loaded one. Signals stay those of the caller."""
    goodput.stopwatch.restart()  # what a notebook did before does not count
    preemption.signals.reset(str)
    with cli.raising_user_errors(RECOVERY), cli.logging_to(None):
        runtime.start()
        with workdir.held(workdir.make(folder)):
            return run(config, epath.Path(folder))
