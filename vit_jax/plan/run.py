"""From a config and a topology to a plan: compile what is asked for, or search for what is best."""

from vit_jax.plan import compilation, estimate, search


def plan(job: compilation.Job, args, limit_gib: float) -> dict:
    """The JSON of a plan, from the compiler."""
    named = dict(config=args.config, topology=args.topology, num_slices=args.num_slices)
    return named | estimate.estimate(job, compilation.compile_job(job), limit_gib)


def run(config, args, limit_gib: float) -> dict:
    """The plan of a config, or with `--search` the best one that was found, with the others in `tried`."""
    job = compilation.make_job(config, args.topology, args.num_slices)
    if not args.search:
        return plan(job, args, limit_gib)
    tried = []
    for settings, candidate in search.candidates(job, limit_gib)[: args.max_compiles]:
        found = plan(compilation.remake(job, candidate), args, limit_gib)
        tried.append(dict(settings=settings, fits=found["fits"], hbm_gib=found["hbm_gib"]["total"], plan=found))
    return search.best(tried)
