"""Records that take long to come, read ahead by threads and handed to TensorFlow in a queue.

tf.data could call Python by itself, but deleting an iterator during such a call waits for its end,
with the lock of Python that the call needs: for calls that wait for a store, that is a deadlock.
"""

import atexit
import threading
import weakref
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data.sources import storage

READERS = 2  # threads, each with a group of records; one more group waits in the queue
END_S = 5  # until a reader that does not end is left to itself
RUNNING = weakref.WeakSet()


class ReadAhead:
    """Adds the records to groups of items, in order."""

    def __init__(self, items: tf.data.Dataset, read: Callable[[np.ndarray], np.ndarray]):
        """
        Args:
          items: dicts of tensors [n, ...], with `index`.
          read: f(index) -> records [n].
        """
        self.spec = items.element_spec | dict(record=tf.TensorSpec([None], tf.string))
        self.items = enumerate(items.as_numpy_iterator())
        self.read = read
        self.choosing = threading.Lock()
        self.turn = threading.Condition()
        self.next = 0  # number of the group whose turn in the queue it is
        self.closed = False
        self.error = None
        dtypes = [spec.dtype for spec in self.spec.values()]
        self.queue = tf.queue.FIFOQueue(1, dtypes, names=list(self.spec))
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(READERS)]
        for thread in self.threads:
            thread.start()
        RUNNING.add(self)

    def groups(self, count: int) -> tf.data.Dataset:
        """The first `count` groups, with `record`."""

        def take(_):
            group = self.queue.dequeue()
            return {key: tf.ensure_shape(group[key], self.spec[key].shape) for key in self.spec}

        return tf.data.Dataset.range(count).map(tf.autograph.experimental.do_not_convert(take))

    def work(self) -> None:
        while not self.closed:
            with self.choosing:
                number, item = next(self.items, (None, None))
            if item is None:
                return
            error = None
            try:
                item["record"] = self.read(item["index"])
            except Exception as raised:  # reported when all groups before it are used
                error = raised
            with self.turn:
                self.turn.wait_for(lambda n=number: self.closed or self.next == n)
                self.put(item, error)
                self.next += 1
                self.turn.notify_all()

    def put(self, item: dict, error: Exception | None) -> None:
        if self.closed:
            return
        if error:
            self.error = error
            self.closed = True
            self.queue.close()  # what is in it can still be taken
            return
        try:
            self.queue.enqueue({key: item[key] for key in self.spec})
        except tf.errors.CancelledError:  # by `close`
            self.closed = True

    def close(self) -> None:
        """Ends the threads, and every wait for a group."""
        if self.closed:  # also when Python ends, after `close_all`
            return
        self.closed = True
        self.queue.close(cancel_pending_enqueues=True)
        with self.turn:
            self.turn.notify_all()


@atexit.register
def close_all() -> None:
    """Ends all threads: one that comes back to a Python that ends would abort the process."""
    running = list(RUNNING)
    if not running:
        return
    storage.stop_waiting()
    for ahead in running:
        ahead.close()
    for ahead in running:
        for thread in ahead.threads:
            thread.join(END_S)
