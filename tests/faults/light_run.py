"""A run as light as can be: a tiny model, trained in JAX on random numbers and saved as
`vit_jax.train` saves.

Started with --serve it forks a run for every line of JSON on stdin, which costs a second instead of
ten.
"""

import hashlib
import json
import logging
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import orbax.checkpoint  # noqa: F401 - here, so that what is forked need not

from vit_jax import errors
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import preemption, preflight, processes, sharding, watchdog

WIDTH = 512  # two matrices of a MiB each, and their momentum: a save takes some time


def make(mesh):
    """(abstract state, init, update): update(state) -> (state, loss), a function of the state
    alone.
    """
    split = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None))
    place = dict(step=sharding.replicated(mesh), w1=split, w2=split, m1=split, m2=split)

    def init():
        one, two = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / WIDTH**0.5
        return dict(step=jnp.zeros((), jnp.int32), w1=one, w2=two, m1=one * 0, m2=two * 0)

    def update(state):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), state["step"]), (32, WIDTH))

        def loss_fn(weights):
            return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - jnp.roll(x, 1, 1)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)((state["w1"], state["w2"]))
        m1, m2 = (
            0.9 * old + grad for old, grad in zip((state["m1"], state["m2"]), grads, strict=True)
        )
        return dict(
            step=state["step"] + 1, w1=state["w1"] - m1, w2=state["w2"] - m2, m1=m1, m2=m2
        ), loss

    shapes = jax.eval_shape(init)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place[name])
        for name, x in shapes.items()
    }
    update = jax.jit(update, donate_argnums=0, out_shardings=(place, sharding.replicated(mesh)))
    return abstract, jax.jit(init, out_shardings=place), update


def digest(state) -> str:
    """SHA-256 of the parts of a state that this process holds."""
    held = hashlib.sha256()
    for name in sorted(state):
        for shard in sorted(
            state[name].addressable_shards, key=lambda shard: shard.index and str(shard.index)
        ):
            held.update(np.asarray(shard.data).tobytes())
    return held.hexdigest()


def train(
    folder: pathlib.Path, steps: int, every: int, pause: float, max_failures: int = 3
) -> None:
    """Trains to `steps`, or from the newest checkpoint on; every process writes what it does to
    run_I.jsonl.
    """
    processes.start()
    mesh = meshes.make_mesh(dict(replica=1, data=1, fsdp=-1, tensor=1))
    preflight.check(dict(steps=steps), checkpoint.absolute(folder))
    abstract, init, update = make(mesh)
    config = ml_collections.ConfigDict(
        dict(keep_last=2, keep_every=0, keep_best="", max_failures=max_failures)
    )
    with (
        jax.set_mesh(mesh),
        (folder / f"run_{jax.process_index()}.jsonl").open("a", buffering=1) as log,
        Checkpointer(checkpoint.absolute(folder) / "checkpoints", config) as checkpointer,
    ):

        def say(**facts):
            log.write(json.dumps(facts | dict(seconds=time.time())) + "\n")

        first, state = checkpointer.restore(lambda meta: abstract) or (0, init())
        say(first=first, digest=digest(state))
        request, number = preemption.SaveRequest(), first
        for number in range(first + 1, steps + 1):
            watchdog.progress.mark(f"step {number}")
            state, loss = update(state)
            say(step=number, loss=float(loss))
            stop = request.due()
            if stop or number == steps or number % every == 0:
                checkpointer.save(number, state, {}, {})
            checkpointer.poll()
            if stop:
                break
            time.sleep(pause)
        while not checkpointer.wait():
            checkpointer.save(number, state, {}, {})
        say(last=number, digest=digest(state), failures=checkpointer.failures)
    if number < steps:
        raise errors.Preempted


def main(arguments: list) -> int:
    logging.getLogger("vit_jax").setLevel(logging.WARNING)
    folder, steps, every, pause, *more = arguments
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    return watchdog.run(
        lambda: train(pathlib.Path(folder), steps, every, pause, *more), debug=False
    )


def serve() -> None:
    """For every line {env, stderr, arguments} forks a run and answers with its process id, then
    with its exit code.
    """
    for line in sys.stdin:
        job = json.loads(line)
        if not (child := os.fork()):
            os.environ.update(job["env"])
            with open(job["stderr"], "w") as file:
                os.dup2(file.fileno(), 1)  # Gloo writes there
                os.dup2(file.fileno(), 2)
            code = main(job["arguments"])
            if jax.distributed.is_initialized():
                jax.distributed.shutdown()  # as Python does at its end: process 0 stays until the others are done
            sys.stderr.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main(json.loads(sys.argv[1])))
