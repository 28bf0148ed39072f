"""`vit_jax.benchmark checkpoint`: how long a save blocks training, and how long saving and
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
    """Saves and restores a fresh state of the config's model."""
    experiment = Experiment.on_devices(config)
    with tempfile.TemporaryDirectory() as temporary, jax.set_mesh(experiment.mesh):
        folder = epath.Path(args.folder or temporary)
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--folder={folder} is not empty: name a new one")
        blocking, saving, restoring, size = measure(config, experiment, folder, args.runs)
    mib = size / 2**20
    name = f"{config.model.variant}, {mib:.0f} MiB"
    return [
        row(f"{name}: training waits for a save", "s", blocking),
        row(f"{name}: save until it is complete", "s", saving),
        row(f"{name}: save until it is complete", "MiB/s", [mib / s for s in saving]),
        row(f"{name}: restore with verified checksums", "s", restoring),
        row(f"{name}: restore with verified checksums", "MiB/s", [mib / s for s in restoring]),
    ]


def measure(
    config, experiment, folder, runs: int
) -> tuple[list[float], list[float], list[float], int]:
    """Seconds that each save blocks training, that it takes until it is complete, and that
    restoring it takes; bytes of the state.
    """
    state = states.fresh_state(experiment)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    abstract = states.as_dict(experiment.abstract_state)
    blocking = []
    saving = []
    restoring = []
    with Checkpointer(folder, config.checkpoint) as checkpointer:
        for number in range(1, runs + 1):
            start = time.perf_counter()
            checkpointer.save(number, states.as_dict(state), dict(model={}), {})
            blocking.append(time.perf_counter() - start)
            if not checkpointer.wait():
                raise UserError(f"a save below {folder} failed: the log above says why")
            saving.append(time.perf_counter() - start)
            (_, restored), seconds = timed(checkpointer.restore, lambda meta: abstract)
            jax.block_until_ready(restored)
            restoring.append(seconds)
    return blocking, saving, restoring, size
