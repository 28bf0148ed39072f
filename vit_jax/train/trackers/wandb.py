"""Weights & Biases. Its own environment variables say where the data go: WANDB_PROJECT,
WANDB_ENTITY, WANDB_MODE (online, offline, disabled), WANDB_DIR and others.
"""

import os
import pathlib
from collections.abc import Mapping

import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.train.trackers import wandb_files
from vit_jax.train.trackers.tracker import Tracker, new_id

PROJECT = "vit_jax"
# Nothing is printed, and neither code nor its changes since the last commit are uploaded.
SETTINGS = dict(silent=True, console="off", disable_code=True, disable_git=True, save_code=False)
SETTINGS |= dict(resume="allow", reinit="create_new")
SETTINGS |= dict(finish_timeout=10)  # seconds; what is not sent is on disk, for `wandb sync`
ELSEWHERE = ("offline", "dryrun", "disabled")  # modes that need no API key


class Wandb(Tracker):
    def __init__(self, config, workdir: epath.Path):
        self.config = config
        self.workdir = workdir

    def start(self, run_id: str | None) -> str:
        import wandb  # takes a second, and is not always installed

        users = wandb.setup(wandb.Settings(silent=True)).settings  # of environment and files
        if users.mode not in ELSEWHERE and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: run `wandb login`, or set WANDB_MODE=offline")
        more = {}
        if users.run_name is None and run_id is None:  # later it may have been renamed
            more["name"] = self.workdir.name
        if "WANDB_DIR" not in os.environ and "://" not in str(self.workdir):
            more["dir"] = str(self.workdir)
        chosen = run_id or users.run_id or new_id()
        self.run = wandb.init(
            id=chosen,
            project=users.project or PROJECT,
            settings=wandb.Settings(**SETTINGS),
            **more,
        )
        self.run.config.update(configs.to_json(self.config), allow_val_change=True)
        self.image = wandb.Image
        return chosen

    def last_step(self) -> int | None:
        """Of the server; offline, of its files on this disk, which lack up to 15 s after a kill."""
        if not self.run.offline:
            return self.run.step - 1
        folder = pathlib.Path(self.run.dir).parent
        return wandb_files.last_step(folder.parent, self.run.id, but=folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=step, commit=True)

    def pictures(self, step: int, name: str, pictures: np.ndarray) -> None:
        images = [self.image(picture) for picture in pictures]
        self.run.log({f"pictures/{name}": images}, step=step, commit=False)

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
