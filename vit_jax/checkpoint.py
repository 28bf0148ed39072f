"""The one wrapper around Orbax: save, restore, which step to resume from, and stopping on SIGTERM."""

import logging
import math
import signal
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)


def worth(metrics) -> float:
    """Larger is better; a checkpoint that was saved without the metric is worth least."""
    return metrics["worth"] if metrics else -math.inf


def silence_late_io() -> None:
    """Orbax closes its event loop when a read or write fails; those still under way then print no traceback each."""
    show = sys.unraisablehook
    if show.__module__ == __name__:
        return

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


class Checkpointer:
    """Checkpoints of one run below `folder`: written in the background, whole or absent."""

    def __init__(self, folder, config):
        """`config`: the `checkpoint` part of a config."""
        keep = [policies.LatestN(config.keep_last)]
        if config.keep_every:
            keep.append(policies.EveryNSteps(config.keep_every))
        if config.keep_best:
            keep.append(policies.BestN(get_metric_fn=worth, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep),
            save_decision_policy=policies.FixedIntervalPolicy(1),
            best_fn=worth if config.keep_best else None,
            cleanup_tmp_directories=True,
        )
        silence_late_io()
        self.keep_best = config.keep_best
        self.manager = ocp.CheckpointManager(epath.Path(folder), options=options)

    def save(self, step: int, state, meta: dict, metrics: dict[str, float]) -> float:
        """Starts a save and returns the seconds that the caller was held up.

        Args:
          step: updates done.
          state: a dict pytree of arrays.
          meta: JSON-able facts, read back by `read_meta`.
          metrics: of this step; `keep_best` is looked up here.
        """
        start = time.perf_counter()
        best = metrics.get(self.keep_best)
        if best is not None:
            best = {"worth": -best if self.keep_best.endswith("/loss") else best}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self.manager.save(step, args=items, metrics=best, force=True)
        return time.perf_counter() - start

    def restore(self, make_abstract) -> tuple[int, dict] | None:
        """The newest checkpoint that can be read, as (step, state), or None when there is none.

        Args:
          make_abstract: f(meta) -> dict pytree of ShapeDtypeStructs with shardings, the layout of that checkpoint.

        Raises:
          UserError: there are checkpoints and none can be read, or they hold another architecture.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        for number, step in enumerate(steps):
            try:
                meta = read_meta(self.manager.directory / str(step))
                abstract = make_abstract(meta)
                items = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
            except Exception as error:
                if jax.process_count() > 1:  # alone, this process would go back to another step than the others
                    raise UserError(
                        f"checkpoint {step} in {self.manager.directory} can't be read ({one_line(error)[:200]}): "
                        "move it away, and the one before is taken"
                    ) from error
                log.warning("checkpoint %s can't be read and is passed over: %s", step, one_line(error)[:300])
                continue
            self.set_aside(steps[:number])
            return step, items["state"]
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.manager.directory} can be read (see the lines above): "
                "restore the folder from a copy, or choose another --workdir"
            )
        return None

    def set_aside(self, steps: list[int]) -> None:
        """Renames unreadable checkpoints to damaged_STEP, so that these steps can be saved again."""
        for step in steps:
            damaged = self.manager.directory / f"damaged_{step}"
            if damaged.exists():
                damaged.rmtree()
            (self.manager.directory / str(step)).rename(damaged)
        if steps:
            self.manager.reload()

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        self.manager.wait_until_finished()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.manager.close()


class SaveRequest:
    """Tells whether SIGTERM (or a preemption notice) asks the run to save and stop.

    One process: our own handler, and a second SIGTERM ends the process at once. Several: JAX's preemption service, by
    which all processes agree on the step.
    """

    def __init__(self):
        self.distributed = jax.distributed.is_initialized()
        self.received = False
        if not self.distributed:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def due(self, step: int) -> bool:
        """Must be asked after every step, by every process."""
        if self.distributed:
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self.received


def absolute(path) -> epath.Path:
    """A local path made absolute, as Orbax wants it; gs:// and the like as they are."""
    return epath.Path(path) if "://" in str(path) else epath.Path(path).expanduser().resolve()


def is_ours(path) -> bool:
    """Whether a folder is a checkpoint, or holds checkpoints."""
    path = epath.Path(path)
    folders = (path, path / "checkpoints")
    return (path / "state").exists() or any(
        child.name.isdigit() for folder in folders if folder.is_dir() for child in folder.iterdir()
    )


def find(path) -> epath.Path:
    """The folder of one checkpoint, from it, from a `checkpoints` folder, or from a workdir (the newest).

    Raises:
      UserError: there is none.
    """
    path = absolute(path)
    for folder in (path, path / "checkpoints"):
        if (folder / "state").exists() and (folder / "meta").exists():
            return folder
        if folder.is_dir():
            steps = [int(child.name) for child in folder.iterdir() if child.name.isdigit()]
            if steps:
                return folder / str(max(steps))
    raise UserError(f"{path} holds no checkpoint: give a workdir, or a folder checkpoints/STEP in one")


def write_params(folder, params: dict, meta: dict) -> None:
    """Writes a checkpoint of parameters alone, whole or not at all.

    Args:
      folder: must not exist.
      params: tree of arrays.
      meta: as for `Checkpointer.save`.
    """
    items = ocp.args.Composite(
        state=ocp.args.StandardSave({"params": params, "ema_params": {}}), meta=ocp.args.JsonSave(meta)
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(absolute(folder), args=items)


def read_meta(folder) -> dict:
    """What `save` was given as `meta`.

    Raises:
      UserError: it can't be read.
    """
    path = epath.Path(folder) / "meta"
    try:
        return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(path)
    except Exception as error:
        raise UserError(f"{path} can't be read ({one_line(error)[:200]}): choose another checkpoint") from error


def read_params(folder) -> dict:
    """Parameters of a checkpoint as numpy arrays on any machine; the averaged ones where the run averages.

    Raises:
      UserError: they can't be read.
    """
    path = epath.Path(folder) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        tree = checkpointer.metadata(path).item_metadata.tree
        name = "ema_params" if tree.get("ema_params") else "params"
        wanted = {name: tree[name]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True)
        return checkpointer.restore(path, args=args)[name]
    except Exception as error:
        raise UserError(f"{path} can't be read ({one_line(error)[:200]}): choose another checkpoint") from error
