"""The checkpoints of a run, by Orbax: written in the background, kept by policy, resumed from the
newest sound one.
"""

import contextlib
import functools
import itertools
import logging
import math
import sys
import threading
import time

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.options import AsyncOptions, MultiprocessingOptions

from vit_jax.checkpoints import checksums
from vit_jax.checkpoints.read import Unreachable, read_meta, read_state, silence_late_io
from vit_jax.distributed import messages
from vit_jax.errors import UserError, one_line, storage_problem

log = logging.getLogger(__name__)

FAILED_SAVE = (
    "vit_jax/failed_save"  # announced by a process, so that the others do not wait for its part
)
openings = itertools.count()  # of managers in this process; all count alike
GRACE_S = 5  # for a save to end while one of several processes ends by an error


class KeepBest:
    """The policy that keeps the best checkpoint by one metric."""

    def __init__(self, metric: str):
        self.metric, self.worths = metric, {}

    def note(self, step: int, metrics: dict[str, float]) -> None:
        if self.metric in metrics:
            self.worths[step] = (
                -metrics[self.metric] if self.metric.endswith("/loss") else metrics[self.metric]
            )

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Called by Orbax with the checkpoints that there are."""
        known = [info.step for info in checkpoints if info.step in self.worths]
        best = max(known, key=self.worths.get, default=None)
        return [info.step == best for info in checkpoints]


class Manager(ocp.CheckpointManager):
    """Orbax's, which would ask on its own whether the run is to stop, and so disturb how the
    processes agree on it.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpointer:
    """Checkpoints of one run below `folder`: written in the background, whole or absent."""

    def __init__(self, folder, config):
        """`config`: the `checkpoint` part of a config."""
        silence_late_io()
        self.folder, self.max_failures = epath.Path(folder), config.max_failures
        self.failures, self.failures_in_row = 0, 0
        self.saving, self.problem = (
            None,
            None,
        )  # the step that is being saved, and what went wrong at its start
        self.best = KeepBest(config.keep_best)
        self.policies = [policies.LatestN(config.keep_last), self.best]
        if config.keep_every:
            self.policies.append(policies.EveryNSteps(config.keep_every))
        self.manager = self.open()
        for step in self.manager.all_steps() if config.keep_best else ():
            with contextlib.suppress(UserError):  # a damaged one is found when it is read
                self.best.note(step, read_meta(self.folder / str(step))["metrics"])

    def open(self) -> Manager:
        """Orbax's part; made anew after a failure, with barriers that nothing left of the failed
        save meets.
        """
        self.opened = next(openings)
        failed = f"{FAILED_SAVE}/{self.opened}"

        def meet(key: str, timeout_ms: int) -> None:
            error = sys.exception()  # of this process, for which the others need not wait
            if error and messages.is_multiprocess():
                messages.signal(failed)
                raise error
            messages.barrier(key, timeout_ms / 1000, unless=failed)

        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(self.policies),
            save_decision_policy=policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
            async_options=AsyncOptions(barrier_sync_fn=meet),
            multiprocessing_options=MultiprocessingOptions(
                barrier_sync_key_prefix=f"opened_{self.opened}"
            ),
        )
        return Manager(self.folder, options=options)

    def save(self, step: int, state, meta: dict, metrics: dict[str, float]) -> dict[str, float]:
        """Starts a save, after the one before has ended; one that fails is told, and training may
        go on.

        Args:
          step: updates done.
          state: a dict pytree of arrays.
          meta: JSON-able facts, read back by `read_meta`; checksums of the state are written beside
            them.
          metrics: of this step; those of evaluations are saved, too.

        Returns:
          Metrics: the seconds that the caller was held up.

        Raises:
          UserError: `max_failures` saves in a row failed.
        """
        start = time.perf_counter()
        self.wait()
        metrics = {
            name: value
            for name, value in metrics.items()
            if name.startswith("eval/") and math.isfinite(value)
        }
        sealed = checksums.seal(meta | dict(step=step, metrics=metrics), state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(sealed)
        )
        self.saving = step
        self.best.note(step, metrics)
        try:
            self.manager = self.manager or self.open()
            self.manager.save(step, args=items, force=True)
        except Exception as error:  # of Orbax, TensorStore, the store
            self.note(error)
        self.poll()
        return {"checkpoint/stall_s": time.perf_counter() - start}

    def poll(self) -> None:
        """Like `wait`, where that takes no wait; of several processes none knows whether the others
        are done.
        """
        busy = self.problem is None and self.manager and self.manager.is_saving_in_progress()
        if jax.process_count() == 1 and not busy:
            self.wait()

    def wait(self) -> bool:
        """Waits for the save that is under way, and returns whether it succeeded, on all processes.

        Raises:
          UserError: `max_failures` saves in a row failed.
        """
        if self.saving is None:
            return True
        step, self.saving = self.saving, None
        try:
            if self.problem is None:
                self.manager.wait_until_finished()
        except Exception as error:
            self.note(error)
        problem, self.problem = self.problem, None
        said = messages.first_problem(f"the end of the save of step {step}", problem)
        if said and self.is_committed(step):
            log.warning(
                "checkpoint %d is saved, but what follows failed, as the deletion of an old one: "
                "%s",
                step,
                said,
            )
            self.close()
        elif said:
            self.failed(step, said)
            return False
        self.failures_in_row = 0
        return True

    def note(self, error: Exception) -> None:
        """Keeps what went wrong with the save under way, and lets the other processes know."""
        self.problem = storage_problem(error) or one_line(error)[:300] or type(error).__name__
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone
            messages.signal(f"{FAILED_SAVE}/{self.opened}")

    def is_committed(self, step: int) -> bool:
        """Whether a save reached its commit, as process 0 sees it."""
        missing = None
        if jax.process_index() == 0:
            try:
                missing = None if step in ocp.path.step.checkpoint_steps(self.folder) else "no"
            except Exception:  # the store is away
                missing = "no"
        return not messages.first_problem(f"the commit of step {step}", missing)

    def failed(self, step: int, problem: str) -> None:
        self.failures, self.failures_in_row = self.failures + 1, self.failures_in_row + 1
        self.best.worths.pop(step, None)
        self.close()
        if self.failures_in_row >= self.max_failures:
            raise UserError(
                f"checkpoint {step} in {self.folder} can't be saved ({problem}), failure "
                f"{self.failures_in_row} in a row: earlier checkpoints are intact; mend it or "
                "choose another --workdir, then run the same command again"
            )
        log.warning(
            "checkpoint %d can't be saved (%s): training goes on, earlier checkpoints are intact; "
            "this was failure %d of %d in a row that end the run",
            *(step, problem, self.failures_in_row, self.max_failures),
        )

    def restore(self, make_abstract) -> tuple[int, dict] | None:
        """The newest checkpoint that is as it was written, as (step, state), or None when there is
        none.

        Newer ones that are not are set aside, by all processes alike.

        Args:
          make_abstract: f(meta) -> dict pytree of ShapeDtypeStructs with shardings, the layout of
            that checkpoint.

        Raises:
          Unreachable: one can't be read now. Nothing has changed.
          UserError: there are checkpoints and none can be used.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        for number, step in enumerate(steps):
            try:
                state = read_state(
                    self.folder / str(step), functools.partial(layout_of, make_abstract, step)
                )
            except Unreachable:
                raise
            except UserError as error:
                log.warning("%s", error)
                continue
            self.set_aside(steps[:number])
            return step, state
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be used (see the lines "
                "above): restore the folder from a copy, or choose another --workdir"
            )
        return None

    def set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints to damaged_STEP, so that these steps can be saved again."""
        for step in steps if jax.process_index() == 0 else ():
            damaged = self.folder / f"damaged_{step}"
            if damaged.exists():
                damaged.rmtree()
            (self.folder / str(step)).rename(damaged)
            log.warning("checkpoint %d is passed over, and now called %s", step, damaged.name)
        if steps:
            messages.first_problem("the damaged checkpoints", None)  # process 0 is done
            self.manager.reload()

    def close(self) -> None:
        """Ends what is under way, whatever becomes of it."""
        if self.manager is not None:
            with contextlib.suppress(Exception):  # it failed, and that was told
                self.manager.close()
        self.manager = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *error) -> None:
        """After an error other processes may not take part in the end of a save any more: it gets
        GRACE_S.
        """
        if kind is None or jax.process_count() == 1:
            return self.close()
        closing = threading.Thread(target=self.close, daemon=True)
        closing.start()
        closing.join(GRACE_S)


def layout_of(make_abstract, step: int, meta: dict) -> dict:
    """make_abstract(meta), if these are the facts of that step."""
    if meta["step"] != step:
        raise UserError(f"it is a copy of checkpoint {meta['step']}")
    return make_abstract(meta)
