"""MLflow. Its own environment variables say where the data go: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and others.
"""

import logging
import os
import re
import time
from collections.abc import Mapping

import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.train.trackers.tracker import Tracker

EXPERIMENT = "vit_jax"
STATUS = {0: "FINISHED", 75: "KILLED"}  # by exit code; all others: FAILED
NOT_ALLOWED = re.compile(r"[^/\w.\- :]")  # in names
LONGEST = 500  # letters of a parameter
GAP = 2  # white pixels between two pictures
MOST = 100  # parameters in one request
TALKATIVE = ("mlflow", "alembic", "urllib3")  # log how they make a database, and every retry


def allowed(name: str) -> str:
    return NOT_ALLOWED.sub("_", name)


class MLflow(Tracker):
    def __init__(self, config, workdir: epath.Path):
        # Otherwise a version from 2026 refuses folders, which older ones wrote by default.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow  # takes seconds, and is not always installed

        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.entities = mlflow.entities
        self.client = mlflow.MlflowClient()
        self.config = config
        self.workdir = workdir
        self.sent: dict[str, int] = {}  # metric -> its last step in the store

    def start(self, run_id: str | None) -> str:
        if run_id is None:
            self.run_id = self.create()
        else:
            self.run_id = run_id
            self.client.update_run(run_id, status="RUNNING")
        data = self.client.get_run(self.run_id).data
        for name in data.metrics:
            history = self.client.get_metric_history(self.run_id, name)
            self.sent[name] = max(metric.step for metric in history)
        self.describe(data.params)
        return self.run_id

    def create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
        run_name = os.environ.get("MLFLOW_RUN_NAME", self.workdir.name)
        return self.client.create_run(experiment, run_name=run_name).info.run_id

    def describe(self, known: Mapping[str, str]) -> None:
        """Sends the config, but for keys that are `known`: MLflow lets no parameter change."""
        flat = {allowed(key): str(value) for key, value in configs.flatten(self.config)}
        params = [
            self.entities.Param(key, value[:LONGEST])
            for key, value in flat.items()
            if key not in known
        ]
        for start in range(0, len(params), MOST):
            self.client.log_batch(self.run_id, params=params[start : start + MOST])

    def last_step(self) -> int:
        """The step before the last one in the store, which may lack some metrics of the last."""
        return max(self.sent.values(), default=0) - 1

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self.entities.Metric(allowed(name), value, now, step)
            for name, value in scalars.items()
            if self.sent.get(allowed(name), -1) < step
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def pictures(self, step: int, name: str, pictures: np.ndarray) -> None:
        """One file, below each other: sent again, it replaces itself."""
        rows = np.pad(pictures, ((0, 0), (0, GAP), (0, 0), (0, 0)), constant_values=255)
        sheet = rows.reshape(-1, *rows.shape[2:])
        self.client.log_image(self.run_id, sheet, f"pictures/{allowed(name)}/{step}.png")

    def finish(self, exit_code: int) -> None:
        self.client.set_terminated(self.run_id, STATUS.get(exit_code, "FAILED"))
