"""The splits that evaluations read: each is opened, and cached, once."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax import config as configs
from vit_jax.cli.spool import Files
from vit_jax.data.sources.source import Source, Subset, with_classes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a data set, ready to be read. Splits with the same key have the same batches."""

    key: tuple
    source: Source
    batches: Callable[[Classifier], Iterator[dict]]  # prepared as the model expects
    # (indices of some examples, batch size) -> the same as `batches` for these.
    chosen: Callable[[Sequence[int], int], Callable[[Classifier], Iterator[dict]]]

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    @property
    def num_examples(self) -> int:
        return len(self.source)

    def labels(self) -> np.ndarray:
        """Of all examples; may need a scan."""
        return self.source.labels()


class Splits:
    """Opens the splits of evaluations; what several evaluations read is opened and cached once."""

    def __init__(self, config, mesh, class_names, num_classes: int, files: Files | None):
        from vit_jax.data import eval_cache

        self.config = config
        self.mesh = mesh
        self.class_names = class_names
        self.num_classes = num_classes
        self.files = files
        self.cache = eval_cache.EvalCache(config.data.eval_cache_gib)
        self.opened: dict[tuple, Split] = {}

    def open(
        self, use: str, data, split: str, is_classified: bool, is_learned: bool = False
    ) -> Split:
        """Opens a split for `use`, such as "evals.val".

        Args:
          data: of the config of the evaluation.
          is_learned: whether the evaluation learns from it. If it measures the rest of the
            training data, it learns from what training sees.
        """
        data_set = data.name or self.config.data.name
        data_dir = data.data_dir or self.config.data.data_dir
        size = data.batch_size or self.config.data.batch_size
        decoding = (size, data.crop, data.get("fraction"), data.method)
        learned = data.rest and is_learned
        key = (data.rest, learned, data_set, data_dir, split, *decoding, is_classified)
        if key not in self.opened:
            if data.rest:
                source = self.part_of_training_data(learned)
            else:
                source = self.source(use, data, data_set, data_dir, split)
            source = self.with_labels(source, use, is_classified)
            batches = self.batches(use, data, source, size)
            chosen = functools.partial(self.chosen, use, data, source)
            self.opened[key] = Split(key, source, batches, chosen)
        return self.opened[key]

    def chosen(self, use: str, data, source, numbers: Sequence[int], size: int) -> Callable:
        """See `Split.chosen`."""
        return self.batches(use, data, Subset(source, numbers), size)

    def part_of_training_data(self, is_learned: bool):
        """What training sees, each image once, or the rest of it."""
        from vit_jax.data.sources import open as sources

        if not is_learned:
            return sources.open_rest(self.config.data, self.config.user)
        data = self.config.data.copy_and_resolve_references()
        with data.unlocked():
            data.class_balance = 0.0
        return sources.open_training(data, self.config.user)

    def source(self, use: str, data, data_set: str, data_dir: str, split: str):
        """Opens a split with its labels."""
        from vit_jax.data.sources import open as sources

        config = self.config
        try:
            return sources.open_source(data_set, split, data_dir, config.user)
        except UserError as error:
            if data.name or configs.uses_labels(config):
                raise
            raise type(error)(
                f"{use} needs labels, which the training data do not have ({error}): set "
                f"{use}.data.name to other data, or leave all evaluations out with "
                "--config.evals={}"
            ) from None

    def with_labels(self, source, use: str, is_classified: bool):
        """The source with labels as the evaluation needs them."""
        if is_classified:
            return with_classes(source, self.class_names, self.num_classes, use)
        if source.set_size:
            raise UserError(
                f"{use} learns from features, for which an image must have one label, but its "
                "images have several: choose other data"
            )
        return source

    def batches(self, use: str, data, source, size: int) -> Callable[[Classifier], Iterator[dict]]:
        """f(model) -> global batches on the mesh, from the start."""
        from vit_jax.data import pipeline, to_device
        from vit_jax.data.skipped import Skipped

        config = self.config
        rows = sharding.local_rows(self.mesh, size)
        common = (config.data.on_corrupt, config.data.threads)
        skipped = Skipped()
        if self.files is not None:
            skipped.list_in(self.files, use)

        @functools.cache
        def decoded(model: Classifier) -> Callable[[], Iterator[dict]]:
            host = pipeline.eval_pipeline(
                data,
                source,
                rows,
                size,
                model.image_size,
                *common,
                model,
                config.data.exif_rotation,
            )
            return self.cache.batches(dataclasses.replace(host, skipped=skipped))

        def batches(model: Classifier) -> Iterator[dict]:
            prefetch = config.data.prefetch
            return to_device.to_device(decoded(model)(), self.mesh, rows, size, prefetch)

        return batches
