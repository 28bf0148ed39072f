"""`vit_jax.benchmark checkpoint`: how long a save holds training up, and how long saving and
restoring take.
"""

import tempfile
import time

import jax
from etils import epath

from vit_jax.benchmark.rows import row
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.errors import UserError
from vit_jax.train import state as states
from vit_jax.train.experiment import Experiment
from vit_jax.train.timer import timed


def run(config, args) -> list[dict]:
    """Saves and restores a fresh state of the config's model.

    Raises:
      UserError: `args.folder` is not empty, or a save failed.
    """
    job = Experiment.on_devices(config)
    with tempfile.TemporaryDirectory() as temporary, jax.set_mesh(job.mesh):
        folder = epath.Path(args.folder or temporary)
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--folder={folder} is not empty: name a new one")
        held, saved, restored, size = measure(config, job, folder, args.runs)
    name = f"{config.model.variant}, {size / 2**20:.0f} MiB"
    return [
        row(f"{name}: training waits for a save", "s", held),
        row(f"{name}: save until it is whole", "s", saved),
        row(
            f"{name}: save until it is whole",
            "MiB/s",
            [size / 2**20 / seconds for seconds in saved],
        ),
        row(f"{name}: restore, checksums compared", "s", restored),
        row(
            f"{name}: restore, checksums compared",
            "MiB/s",
            [size / 2**20 / seconds for seconds in restored],
        ),
    ]


def measure(config, job, folder, runs: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds that each save held up, that it took, and that its restoring took; bytes of the
    state.
    """
    state = states.fresh_state(config, job.model, job.tx, job.state)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    held, saved, restored = [], [], []
    with Checkpointer(folder, config.checkpoint) as checkpointer:
        for number in range(1, runs + 1):
            start = time.perf_counter()
            checkpointer.save(number, states.as_dict(state), dict(model={}), {})
            held.append(time.perf_counter() - start)
            if not checkpointer.wait():
                raise UserError(f"a save below {folder} failed: the log above says why")
            saved.append(time.perf_counter() - start)
            (_, found), seconds = timed(
                checkpointer.restore, lambda meta: states.as_dict(job.state)
            )
            jax.block_until_ready(found)
            restored.append(seconds)
    return held, saved, restored, size
