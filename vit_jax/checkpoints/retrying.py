"""Background saves by Orbax that may fail: a failed save is counted and logged, training goes on,
and the next save starts with a new Orbax manager.
"""

import contextlib
import itertools
import logging
import sys
import threading

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.options import AsyncOptions, MultiprocessingOptions

from vit_jax.distributed import messages
from vit_jax.distributed.waits import ongoing, waiting
from vit_jax.errors import UserError, one_line, storage_problem

log = logging.getLogger(__name__)

# Announced by a process whose save failed, so that the others do not wait for its part.
FAILED_SAVE = "vit_jax/failed_save"
manager_ids = itertools.count()  # counted alike on all processes
GRACE_S = 5  # for a save to end while one of several processes ends with an error


def save_no_array_metadata() -> None:
    """Leaves out the array metadata that only random keys need, of which a state has none: on a
    store it takes a sixth of the requests of a save.
    """
    handler = ocp.type_handlers.ArrayHandler(array_metadata_store=None)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


class Manager(ocp.CheckpointManager):
    """Without Orbax's own check for preemption, which would disturb how the processes agree on a
    stop.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class RetryingSaves:
    """Saves one checkpoint at a time; gives up after `max_failures` failures in a row.

    All processes must call `start` and `wait` in the same order: they agree on whether a save
    succeeded.
    """

    def __init__(self, folder, policy: policies.PreservationPolicy, max_failures: int):
        """`policy` says which checkpoints are not deleted."""
        self.folder = folder
        self.policy = policy
        self.max_failures = max_failures
        self.failures = 0
        self.failures_in_row = 0
        self.step = None  # of the save in progress
        self.succeeded = True  # of the last save that ended
        self.problem = None  # with the save in progress, if it could not be started
        save_no_array_metadata()
        self.manager = self.open()

    def open(self) -> Manager:
        """A new Orbax manager, whose barriers nothing of an earlier, failed save can reach."""
        number = next(manager_ids)
        failed_key = f"{FAILED_SAVE}/{number}"
        self.failed_key = failed_key

        def barrier(key: str, timeout_ms: int) -> None:
            error = sys.exception()  # of this process: the others need not wait for it
            if error and messages.is_multiprocess():
                messages.signal(failed_key)
                raise error
            messages.barrier(key, timeout_ms / 1000, unless=failed_key)

        options = ocp.CheckpointManagerOptions(
            preservation_policy=self.policy,
            save_decision_policy=policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
            async_options=AsyncOptions(barrier_sync_fn=barrier),
            multiprocessing_options=MultiprocessingOptions(
                barrier_sync_key_prefix=f"opened_{number}"
            ),
        )
        return Manager(self.folder, options=options)

    def opened(self) -> Manager:
        """The manager; a new one after a failed save."""
        if self.manager is None:
            self.manager = self.open()
        return self.manager

    def start(self, step: int, items: ocp.args.Composite) -> None:
        """Starts a save; call `wait` before."""
        self.step = step
        try:
            with waiting(f"the save of step {step} to begin"):
                self.opened().save(step, args=items, force=True)
        except Exception as error:  # of Orbax, TensorStore or the store
            self.record(error)
        self.poll()

    def poll(self) -> None:
        """Like `wait` if the save is over, else nothing. Does nothing if there are several
        processes: none knows whether the others have finished.
        """
        busy = self.problem is None and self.manager and self.manager.is_saving_in_progress()
        if jax.process_count() == 1 and not busy:
            self.wait()

    def wait(self) -> bool:
        """Waits for the save in progress, and returns whether it, or else the one before,
        succeeded, on all processes.

        Raises:
          UserError: `max_failures` saves in a row failed.
        """
        if self.step is None:
            return self.succeeded
        try:
            if self.problem is None:
                with waiting(f"the save of step {self.step}"):
                    self.manager.wait_until_finished()
        except Exception as error:
            self.record(error)
        step, problem = self.step, self.problem
        self.step = None
        self.problem = None
        problem = messages.first_problem(f"the end of the save of step {step}", problem)
        self.succeeded = not problem or self.is_committed(step)
        if not self.succeeded:
            self.count_failure(step, problem)
            return False
        if problem:
            log.warning(
                "checkpoint %d is saved, but a later task, such as deleting an old one, failed: %s",
                step,
                problem,
            )
            self.close()
        self.failures_in_row = 0
        return True

    def record(self, error: Exception) -> None:
        """Stores what went wrong with the save in progress, and signals it to the other
        processes.
        """
        self.problem = storage_problem(error) or one_line(error)[:300] or type(error).__name__
        # Threads of Orbax wait ten minutes for the parts of a save that did not begin.
        ongoing.was_abandoned = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has ended
            messages.signal(self.failed_key)

    def is_committed(self, step: int) -> bool:
        """Whether process 0 sees the finished checkpoint."""
        missing = None
        if jax.process_index() == 0:
            try:
                if step not in ocp.path.step.checkpoint_steps(self.folder):
                    missing = "no"
            except Exception:  # the store can't be reached
                missing = "no"
        return not messages.first_problem(f"the commit of step {step}", missing)

    def count_failure(self, step: int, problem: str) -> None:
        self.failures += 1
        self.failures_in_row += 1
        self.close()
        if self.failures_in_row >= self.max_failures:
            raise UserError(
                f"checkpoint {step} in {self.folder} can't be saved ({problem}), failure "
                f"{self.failures_in_row} in a row: earlier checkpoints are intact; fix it or "
                "choose another --workdir, then run the same command again"
            )
        log.warning(
            "checkpoint %d can't be saved (%s): training goes on, earlier checkpoints are intact; "
            "failure %d in a row, the run ends after %d",
            step,
            problem,
            self.failures_in_row,
            self.max_failures,
        )

    def close(self) -> None:
        """Ends the save in progress; one that fails now was reported before."""
        if self.manager is not None:
            with contextlib.suppress(Exception), waiting("the last save to end"):
                self.manager.close()
        self.manager = None

    def close_in_time(self) -> None:
        """`close` after an error: other processes may not finish their part, so it gets GRACE_S."""
        closing = threading.Thread(target=self.close, daemon=True)
        closing.start()
        closing.join(GRACE_S)
