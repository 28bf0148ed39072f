"""A light run: a tiny model, trained on random numbers without TensorFlow, and saved as
`vit_jax.train` saves.

With --serve it forks a run for every line of JSON on stdin, which takes a second instead of ten;
with --serve_store, TensorFlow is imported before, through which checkpoints on a store are written.
"""

import contextlib
import hashlib
import importlib
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
import orbax.checkpoint  # noqa: F401 - imported once, before forking

from vit_jax import errors
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.cli import spool
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import preemption, preflight, processes, sharding, watchdog
from vit_jax.train.workdir import continuation

WIDTH = 512  # two matrices of 1 MiB each, and their momentum, so that a save takes some time


def make(mesh):
    """(abstract state, init, update); update(state) -> (state, loss) depends only on the state."""
    split = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None))
    shardings = dict(step=sharding.replicated(mesh), w1=split, w2=split, m1=split, m2=split)

    def init():
        one, two = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / WIDTH**0.5
        return dict(step=jnp.zeros((), jnp.int32), w1=one, w2=two, m1=one * 0, m2=two * 0)

    def update(state):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), state["step"]), (32, WIDTH))

        def loss_fn(weights):
            return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - jnp.roll(x, 1, 1)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)((state["w1"], state["w2"]))
        m1 = 0.9 * state["m1"] + grads[0]
        m2 = 0.9 * state["m2"] + grads[1]
        weights = dict(w1=state["w1"] - m1, w2=state["w2"] - m2)
        return dict(step=state["step"] + 1, m1=m1, m2=m2, **weights), loss

    shapes = jax.eval_shape(init)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in shapes.items()
    }
    update = jax.jit(update, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
    return abstract, jax.jit(init, out_shardings=shardings), update


def digest(state) -> str:
    """SHA-256 of the shards of a state on this process."""
    digest = hashlib.sha256()
    for name in sorted(state):
        for shard in sorted(
            state[name].addressable_shards, key=lambda shard: shard.index and str(shard.index)
        ):
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()


def train(
    folder: pathlib.Path,
    steps: int,
    every: int,
    pause: float,
    max_failures: int = 3,
    store: str = "",
) -> None:
    """Trains up to step `steps`, from the newest checkpoint if there is one; every process writes
    what it does to run_I.jsonl.

    Args:
      store: where the checkpoints and a copy of these lines are written, if not in `folder`.
    """
    processes.start()
    mesh = meshes.make_mesh(dict(replica=1, data=1, fsdp=-1, tensor=1))
    preflight.check(dict(steps=steps), checkpoint.absolute(folder))
    abstract, init, update = make(mesh)
    workdir = checkpoint.absolute(store or folder)
    config = ml_collections.ConfigDict(
        dict(keep_last=2, keep_every=0, keep_best="", max_failures=max_failures)
    )
    with (
        jax.set_mesh(mesh),
        (folder / f"run_{jax.process_index()}.jsonl").open("a", buffering=1) as log,
        contextlib.closing(spool.open_files(workdir, every_s=0.5)) as files,
        Checkpointer(workdir / "checkpoints", config) as checkpointer,
        preemption.signals.listening(lambda: continuation(workdir)),
        preemption.SaveRequest(lambda: continuation(workdir)) as request,
    ):
        lines = files.path("lines.jsonl")

        def write(**facts):
            line = json.dumps(facts | dict(seconds=time.time())) + "\n"
            log.write(line)
            with lines.open("a") as file:
                file.write(line)

        def save():
            files.deliver()
            checkpointer.save(number, state, {}, {})

        first, state = checkpointer.restore(lambda meta: abstract) or (0, init())
        write(first=first, digest=digest(state))
        number = first
        for number in range(first + 1, steps + 1):
            watchdog.progress.mark(f"step {number}")
            state, loss = update(state)
            write(step=number, loss=float(loss))
            stop = request.due()
            if stop or number == steps or number % every == 0:
                save()
            checkpointer.poll()
            if stop:
                break
            time.sleep(pause)
        while not checkpointer.wait():
            save()
        write(last=number, digest=digest(state), failures=checkpointer.failures)
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
    """Forks a run for every line {env, stderr, arguments}, and prints its process id, then its exit
    code.
    """
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            os.environ.update(job["env"])
            with open(job["stderr"], "w") as file:
                os.dup2(file.fileno(), 1)  # Gloo writes to stdout
                os.dup2(file.fileno(), 2)
            code = main(job["arguments"])
            if jax.distributed.is_initialized():
                # As Python does at its end: process 0 stays until the others are done.
                jax.distributed.shutdown()
            if "WHOLE_END" in os.environ:
                sys.exit(code)
            sys.stderr.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve_store"]:
        importlib.import_module("tensorflow")
    if sys.argv[1:] in (["--serve"], ["--serve_store"]):
        serve()
    else:
        sys.exit(main(json.loads(sys.argv[1])))
