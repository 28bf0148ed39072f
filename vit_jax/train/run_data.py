"""The data of a run: the training split as a source, then as batches on the mesh; and those of the
evaluations.

What needs TensorFlow is imported inside, so that --help is quick.
"""

from collections.abc import Iterator

from vit_jax import config as configs
from vit_jax.cli.spool import Files
from vit_jax.data.left_out import LeftOut
from vit_jax.distributed import sharding
from vit_jax.distributed.waits import waiting
from vit_jax.errors import UserError
from vit_jax.evaluate import suite
from vit_jax.train.experiment import Experiment


def open_training_data(config):
    """The training split as a source."""
    from vit_jax.data.sources import open as sources

    with waiting(f"the index of {config.data.name}"):
        return sources.open_training(config.data, config.user, configs.uses_labels(config))


def open_evaluations(experiment: Experiment, files: Files) -> dict:
    config = experiment.config
    facts = experiment.facts
    with waiting("the data of the evaluations"):
        return suite.open_all(config, experiment.mesh, facts.class_names, facts.num_classes, files)


def open_pipeline(experiment: Experiment, source, files: Files, left_out: LeftOut):
    """From the source to batches on the host."""
    from vit_jax.data import pipeline

    config = experiment.config
    rows = sharding.local_rows(experiment.mesh, config.data.batch_size)
    host = pipeline.train_pipeline(config, source, rows, experiment.total_steps, left_out)
    host.skipped.list_in(files, "train")
    return host


def first_rows(experiment: Experiment, source, count: int) -> dict:
    """The first rows of the first batch of training, on the mesh: `count`, or as many more as the
    devices can divide.
    """
    from vit_jax.data import pipeline, to_device

    config = experiment.config
    mesh = experiment.mesh
    shards = sharding.batch_shards(mesh)
    count = min(-(-count // shards) * shards, config.data.batch_size)
    rows = sharding.local_rows(mesh, count)
    batches = pipeline.train_pipeline(config, source, rows, total_steps=1).batches()
    return next(to_device.to_device(batches, mesh, rows, count, prefetch=1))


def check_unchanged(source) -> None:
    """Raises UserError if a file has changed since its records were counted: others may be at their
    places, with other labels.
    """
    path = source.changed_file()
    if path:
        raise UserError(
            f"{path} was changed while the run reads it: the steps since the last checkpoint may "
            "have seen wrong labels, and are not saved; restore the file, and run the same command "
            "again"
        )


def device_batches(experiment: Experiment, pipeline, done: int) -> Iterator[dict]:
    """Global batches on the mesh, from that of the update after `done` on."""
    from vit_jax.data import to_device

    data = experiment.config.data
    rows = sharding.local_rows(experiment.mesh, data.batch_size)
    batches = pipeline.batches(done)
    return to_device.to_device(
        batches, experiment.mesh, rows, data.batch_size, data.prefetch, pipeline.stages
    )
