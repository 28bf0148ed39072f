"""The checkpoints of a run: saved in the background, deleted by policy, resumed from the newest
valid one.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import cli
from vit_jax.checkpoints import checksums
from vit_jax.checkpoints.read import Unreachable, read_meta, read_state, silence_late_io
from vit_jax.checkpoints.retrying import RetryingSaves
from vit_jax.cli import regular
from vit_jax.distributed import messages
from vit_jax.distributed.waits import waiting
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


class KeepBest:
    """The policy that keeps the best checkpoint by one metric; of equal ones the first.

    Orbax's BestN does not fit: after a restart it ranks by metrics in a file of Orbax's own, which
    is not covered by our checksums and which earlier checkpoints do not have.
    """

    def __init__(self, metric: str):
        self.metric = metric
        self.sign = -1 if metric.endswith("/loss") else 1  # of a loss the lowest is best
        self.scores = {}

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self.scores.pop(step, None)
        if math.isfinite(metrics.get(self.metric, math.nan)):
            self.scores[step] = self.sign * metrics[self.metric]

    def best_of(self, steps: Iterable[int]) -> int | None:
        scored = [step for step in sorted(steps) if step in self.scores]
        return max(scored, key=self.scores.get, default=None)

    def step_until(self, last: int) -> int | None:
        """The best checkpoint up to step `last`, if one has the metric."""
        return self.best_of(step for step in self.scores if step <= last)

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Called by Orbax with all checkpoints."""
        best = self.best_of(info.step for info in checkpoints)
        return [info.step == best for info in checkpoints]


def newest_before(steps: list[int], every: int, limit: int) -> int | None:
    """Of the checkpoints at multiples of `every` the newest up to step `limit`, else the oldest;
    None if there are none.

    Others, such as those of a preemption, do not count: they depend on how a run was interrupted.
    """
    periodic = [step for step in steps if step % every == 0]
    early = [step for step in periodic if step <= limit]
    return max(early, default=min(periodic, default=None))


class KeepReach:
    """The policy that keeps the periodic checkpoints of the last `reach` steps and one before: from
    any step on, a run can go back that far, even if others, of preemptions, count in `keep_last`.
    """

    def __init__(self, reach: int, every: int):
        self.reach = reach
        self.every = every

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Called by Orbax with all checkpoints."""
        steps = [info.step for info in checkpoints]
        first = newest_before(steps, self.every, max(steps, default=0) - self.reach)
        return [step % self.every == 0 and step >= first for step in steps]


class Checkpointer:
    """Checkpoints of one run below `folder`: saved in the background, complete or absent."""

    def __init__(self, folder, config, reach: int = 0):
        """
        Args:
          config: the `checkpoint` part of a config.
          reach: steps, see `KeepReach`; 0: off.
        """
        silence_late_io()
        self.folder = epath.Path(folder)
        regular.check_below(self.folder)
        self.best = KeepBest(config.keep_best)
        preserved = [policies.LatestN(config.keep_last), self.best]
        if reach:
            preserved.append(KeepReach(reach, config.every))
        if config.keep_every:
            preserved.append(policies.EveryNSteps(config.keep_every))
        policy = policies.AnyPreservationPolicy(preserved)
        with waiting(f"the checkpoints in {self.folder} to be listed"):
            self.saves = RetryingSaves(self.folder, policy, config.max_failures)
        if config.keep_best:
            for step in self.saves.manager.all_steps():
                with contextlib.suppress(UserError):  # a damaged one is reported by `restore`
                    self.best.add(step, read_meta(self.folder / str(step))["metrics"])

    @property
    def failures(self) -> int:
        """Saves that failed."""
        return self.saves.failures

    def save(self, step: int, state, meta: dict, metrics: dict[str, float]) -> dict[str, float]:
        """Starts a save, after the one before has ended. If it fails, that is logged, and training
        goes on.

        Args:
          step: updates done.
          state: a dict pytree of arrays.
          meta: JSON-able facts, read back by `read_meta`; saved with checksums of the state.
          metrics: of this step; those of evaluations are saved, too.

        Returns:
          Metrics: the seconds for which the caller had to wait.

        Raises:
          UserError: `max_failures` saves in a row failed.
        """
        start = time.perf_counter()
        self.saves.wait()
        metrics = {
            name: value
            for name, value in metrics.items()
            if name.startswith("eval/") and math.isfinite(value)
        }
        self.best.add(step, metrics)
        facts = dict(step=step, metrics=metrics, best=self.best.step_until(step))
        sealed = checksums.seal(meta | facts, state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(sealed)
        )
        self.saves.start(step, items)
        return {"checkpoint/stall_s": time.perf_counter() - start}

    def poll(self) -> None:
        """See `RetryingSaves.poll`."""
        self.saves.poll()

    def wait(self) -> bool:
        """See `RetryingSaves.wait`."""
        return self.saves.wait()

    def steps(self) -> list[int]:
        """Those of all checkpoints, after the end of the save in progress."""
        self.saves.wait()
        return list(self.saves.opened().all_steps())

    def delete(self, after: int, is_abandoned: Callable[[dict], bool]) -> None:
        """Deletes the checkpoints after a step whose meta is of a part of the run that was given
        up. A damaged one is left to `restore`.

        Raises:
          Unreachable: one can't be read now.
        """
        later = [step for step in self.steps() if step > after]
        for step in later if jax.process_index() == 0 else ():
            if self.meta_says(step, is_abandoned):
                log.warning("checkpoint %d is of what was given up, and is deleted", step)
                (self.folder / str(step)).rmtree()
        messages.first_problem("the deletion of checkpoints", None)  # wait for process 0
        self.saves.opened().reload()

    def meta_says(self, step: int, is_so: Callable[[dict], bool]) -> bool:
        """is_so(meta of a checkpoint); False if it is damaged."""
        try:
            return is_so(read_meta(self.folder / str(step)))
        except Unreachable:
            raise
        except UserError:
            return False

    def restore(self, make_abstract) -> tuple[int, dict] | None:
        """The newest valid checkpoint, as (step, state), or None if there are no checkpoints.

        Newer, damaged ones are renamed; all processes agree on which.

        Args:
          make_abstract: f(meta) -> dict pytree of ShapeDtypeStructs with shardings, the layout of
            that checkpoint.

        Raises:
          Unreachable: one can't be read now. Nothing has changed.
          UserError: there are checkpoints, and none can be used.
        """
        steps = sorted(self.steps(), reverse=True)
        for number, step in enumerate(steps):
            layout = functools.partial(layout_of, make_abstract, step)
            try:
                with waiting(f"checkpoint {step} to be read"):
                    state = read_state(self.folder / str(step), layout)
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
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                damaged = cli.name_for_damaged(self.folder / str(step))
                (self.folder / str(step)).rename(damaged)
                log.warning("checkpoint %d is passed over, and now called %s", step, damaged.name)
        messages.first_problem("the damaged checkpoints", None)  # wait for process 0
        self.saves.opened().reload()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error) -> None:
        if kind is None or jax.process_count() == 1:
            self.saves.close()
        else:
            self.saves.close_in_time()


def layout_of(make_abstract, step: int, meta: dict) -> dict:
    """make_abstract(meta), if the meta is that of `step`."""
    if meta["step"] != step:
        raise UserError(f"it is a copy of checkpoint {meta['step']}")
    return make_abstract(meta)
