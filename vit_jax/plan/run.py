"""From a config and a topology to a plan: compile the config, or search for the best settings."""

import sys

import jax

from vit_jax.errors import UserError, one_line, printable
from vit_jax.plan import compilation, figures, report, search
from vit_jax.train.experiment import Experiment


def plan(experiment: Experiment, args, limit_gib: float) -> dict:
    """The JSON of a plan, from the compiler."""
    named = dict(config=args.location, topology=args.topology, num_slices=args.num_slices)
    return named | figures.estimate(experiment, compilation.compile_step(experiment), limit_gib)


def attempt(experiment: Experiment, settings: dict, config, args, limit_gib: float) -> dict:
    """Settings of a search with their plan, or with the error that they led to."""
    try:
        return dict(
            settings=settings, plan=plan(compilation.remake(experiment, config), args, limit_gib)
        )
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return dict(settings=settings, error=one_line(error)[:200])


def run(args, limit_gib: float) -> dict:
    """The plan of a config, or with `--search` the best one, with a summary of all in `tried`."""
    experiment = compilation.on_topology(args.config, args.topology, args.num_slices)
    if not args.search:
        return plan(experiment, args, limit_gib)
    tried = []
    for settings, candidate in search.candidates(experiment, limit_gib)[: args.max_compiles]:
        tried.append(attempt(experiment, settings, candidate, args, limit_gib))
        outcome = report.outcome(search.summary(tried[-1]))
        print(f"{len(tried)}: {printable(outcome)}", file=sys.stderr, flush=True)
    return search.best(tried)
