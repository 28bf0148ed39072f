"""Early stopping: a run ends if its checkpoints have not become better for a while.

What is counted depends only on the steps and metrics of the checkpoints, so it goes on where it was
after a stop.
"""

import logging

import jax
import jax.numpy as jnp

from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.distributed import messages
from vit_jax.errors import UserError
from vit_jax.train import step
from vit_jax.train.experiment import Experiment
from vit_jax.weights import scan_layout

log = logging.getLogger("vit_jax.train")


class EarlyStopping:
    """Whether the run is over, because `config.early_stopping` checkpoints in a row were not better
    than the best one by `checkpoint.keep_best`.
    """

    def __init__(self, experiment: Experiment, checkpointer: Checkpointer):
        config = experiment.config
        self.patience = config.early_stopping
        self.every = config.checkpoint.every
        self.experiment = experiment
        self.total_steps = experiment.total_steps
        self.checkpointer = checkpointer
        self.best = checkpointer.best
        self.over = False

    def ranks(self, number: int) -> bool:
        """Whether a checkpoint after this update counts."""
        is_last = number == self.total_steps
        return self.patience > 0 and (is_last or number % self.every == 0)

    def ranks_by(self, name: str) -> bool:
        """Whether this evaluation measures what ranks checkpoints."""
        return self.best.metric.startswith(f"eval/{name}/")

    def check(self, scalars: dict[str, float]) -> None:
        """Raises UserError if an evaluation that ranks checkpoints does not have their metric: what
        one of the user's own returns may be known only now.
        """
        name = self.best.metric.rpartition("/")[0]
        measured = [key for key in scalars if key.startswith(f"{name}/")]
        if measured and self.best.metric not in measured:
            raise UserError(
                f"config key checkpoint.keep_best={self.best.metric!r} is not a metric of evals: "
                f"there are {', '.join(measured)}: choose one of them"
            )

    def since_best(self, number: int) -> int:
        """Checkpoints after the best one; 0 if none has the metric, as at the start of a branch."""
        best = self.best.step_until(number)
        return 0 if best is None else (number - best) // self.every

    def decide(self, number: int) -> None:
        """Sets `over`, on all processes as on process 0."""
        if not self.patience:
            return
        is_over = self.since_best(number) >= self.patience
        answers = messages.all_gather(
            f"the decision on step {number}", str(is_over), messages.PATIENCE_S
        )
        self.over = answers[0] == str(True)
        if self.over:
            log.info(
                "early stopping: %s was best at step %d and not better in the %d checkpoints "
                "since: the run ends at step %d of %d",
                *(self.best.metric, self.best.step_until(number), self.since_best(number)),
                *(number, self.total_steps),
            )

    def add(self, number: int, scalars: dict[str, float]) -> dict[str, float]:
        """Takes the metrics of a checkpoint; returns how many there are since the best."""
        self.best.add(number, scalars)
        self.decide(number)
        return {"checkpoint/since_best": self.since_best(number)}

    def best_params(self, number: int, state: step.TrainState):
        """The parameters to evaluate of the best checkpoint up to this update, whose state this is;
        only those that were saved count.
        """
        params = self.experiment.eval_params(state)
        earlier = [saved for saved in self.checkpointer.steps() if saved < number]
        best = self.best.best_of([*earlier, number])
        if best in (None, number):
            return params
        log.info("evaluations at the end are of checkpoint %d, the best", best)
        saved = checkpoint.read_params(self.checkpointer.folder / str(best))
        saved = self.experiment.objective.of_model(saved)
        saved = scan_layout.relayout(saved, self.experiment.model.scan, jnp.stack)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, params)
