"""What a study will cost, without running it: FLOPs of every run, and days of chips by plan."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vit_jax import config as configs
from vit_jax.plan import pods_page
from vit_jax.study.definition import StudyRun
from vit_jax.train.experiment import Experiment

log = logging.getLogger("vit_jax.study")

# Keys of the config that change the number of steps, their data or a constant, and not the time of
# a step.
SAME_PROGRAM = ("seed", "total_steps", "total_epochs", "data.split", "data.num_examples")
SAME_PROGRAM += ("optim.lr",)


@dataclasses.dataclass(frozen=True)
class Cost:
    run: StudyRun
    parameters: int
    gflops: float  # of training, per image
    steps: int
    images: int
    epochs: float
    exaflops: float
    step_s: tuple[float, float] | None = None  # low and high of a step on a pod, if it fits
    chips: int = 0

    @property
    def chip_days(self) -> tuple[float, float] | None:
        if self.step_s is None:
            return None
        return tuple(self.chips * seconds * self.steps / 86_400 for seconds in self.step_s)


def of_run(run: StudyRun) -> Cost:
    """What its config declares: the FLOPs of Table 6 of arXiv 2010.11929, of the forward and the
    backward pass, 2 for each multiplication with its addition.
    """
    config = run.config()
    experiment = Experiment.declared(config)
    sizes = experiment.sizes
    images = sizes["batch_size"] * sizes["total_steps"]
    return Cost(
        run=run,
        parameters=sizes["parameters"],
        gflops=sizes["train_flops_per_image"] / 1e9,
        steps=sizes["total_steps"],
        images=images,
        epochs=images / sizes["num_examples"],
        exaflops=images * sizes["train_flops_per_image"] / 1e18,
    )


def program_of(run: StudyRun) -> str:
    """The same for runs whose step is the same program."""
    flat = dict(configs.flatten(configs.to_json(run.config())))
    kept = {key: value for key, value in flat.items() if key not in SAME_PROGRAM}
    return json.dumps(kept, sort_keys=True)


def planned(costs: Sequence[Cost], topology: str, jobs: int) -> list[Cost]:
    """The same with what a step takes on a pod; each program is compiled once.

    Args:
      jobs: compiles at once.

    Raises:
      UserError: the config of a run can't be planned.
    """
    programs = [program_of(cost.run) for cost in costs]
    runs = dict(zip(programs, (cost.run for cost in costs), strict=True))

    def plan(run: StudyRun) -> dict:
        found = pods_page.plan([*run.arguments, f"--topology={topology}"])
        log.info("compiled: %s", run.name)
        return found

    log.info("programs to compile: %d", len(runs))
    with ThreadPoolExecutor(jobs) as pool:
        plans = dict(zip(runs, pool.map(plan, runs.values()), strict=True))
    return [with_plan(cost, plans[program]) for cost, program in zip(costs, programs, strict=True)]


def with_plan(cost: Cost, plan: dict) -> Cost:
    if not plan["fits"]:
        return cost
    step_s = tuple(plan["step_ms"][end] / 1e3 for end in ("low", "high"))
    return dataclasses.replace(cost, step_s=step_s, chips=plan["num_chips"])
