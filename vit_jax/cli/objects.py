"""Objects on a store (gs://, s3://), by TensorStore's client.

A request reads a range or writes an object. Many are under way at a time; one that fails because
the store is busy is repeated after growing pauses.
"""

import functools
import os
import re

from etils import epath

from vit_jax.errors import UserError, one_line, storage_problem

# At a time, over all buckets. A core decodes about 1,000 images a second, which need as many
# requests of 30 ms.
REQUESTS = max(64, 32 * (os.cpu_count() or 1))
RETRIES = 10  # of one request, after 429 and 5xx; with pauses of up to MAX_DELAY_S, about 2 minutes
MAX_DELAY_S = 16
STALL_S = 30  # without a byte, after which a request is repeated
CONNECT_S = 10
PROBES = 4  # repetitions, with pauses of 8 s in all, of what finds out whether a bucket is there
PROBE_S = 40  # for the answer to that
ADDRESS = re.compile(r"((?:gs|s3)://[^/]+/)(.*)", re.DOTALL)


def is_object(path: str) -> bool:
    """Whether a path is one that `locate` accepts."""
    return bool(ADDRESS.fullmatch(path))


def locate(path: str, retries: int = RETRIES):
    """(bucket as a `tensorstore.KvStore`, key) of a path such as gs://BUCKET/KEY."""
    root, key = ADDRESS.fullmatch(path).groups()
    return bucket(root, retries), key


def locate_any(path: str):
    """`locate` for a path on a store or a disk."""
    if is_object(path):
        return locate(path)
    import tensorstore as ts

    folder, _, name = path.rpartition("/")
    return ts.KvStore.open(dict(driver="file", path=f"{folder}/")).result(), name


@functools.cache
def bucket(root: str, retries: int = RETRIES):
    """The bucket of a path such as gs://BUCKET/; opening it makes no request."""
    import tensorstore as ts  # takes a moment; most commands need no store

    return ts.KvStore.open(root, context=context(retries)).result()


def read(path: str, start: int | None = None, stop: int | None = None, retries: int = RETRIES):
    """Begins to read the bytes from `start` up to `stop`; a negative `start` counts from the end.

    Returns:
      a future of a `tensorstore.KvStore.ReadResult`, with `state`, `value` and `stamp`.
    """
    store, key = locate(path, retries)
    return store.read(key, byte_range=slice(start, stop))


def content(path: str) -> bytes | None:
    """A whole object; None if there is none."""
    found = read(path).result()
    return found.value if found.state == "value" else None


def names(folder: str) -> list[str]:
    """Objects and folders directly in a folder such as gs://BUCKET/FOLDER/, in alphabetical order;
    none if there is no such folder.
    """
    import tensorstore as ts

    store, prefix = locate(folder)
    end = prefix[:-1] + "0" if prefix else ""  # the character after "/"
    keys = store.list(ts.KvStore.KeyRange(prefix, end)).result()
    below = (key.decode("utf-8", "surrogateescape").removeprefix(prefix) for key in keys)
    # A console may have made an object that stands for the folder itself.
    return sorted({name.partition("/")[0] for name in below} - {""})


@functools.cache
def context(retries: int = RETRIES):
    # These are read when TensorStore's client is used for the first time.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(STALL_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(CONNECT_S))
    import tensorstore as ts

    repeat = dict(max_retries=retries, initial_delay="500ms", max_delay=f"{MAX_DELAY_S}s")
    return ts.Context(
        {
            "gcs_request_concurrency": dict(limit=REQUESTS),
            "gcs_request_retries": repeat,
            "s3_request_concurrency": dict(limit=REQUESTS),
            "s3_request_retries": repeat,
        }
    )


def must_be_reachable(path: str, what: str) -> None:
    """Raises UserError "WHAT can't be reached" if `path` is on a store that does not let this
    process read it; paths elsewhere are fine.

    Call it before `epath` is asked: TensorFlow's client would repeat for minutes, and for ever if
    it creates a folder in a bucket that does not exist.
    """
    address = f"{path}/"
    if not is_object(address):
        return
    try:
        store, key = locate(address, PROBES)
        store.read(key.strip("/") or "vit_jax", byte_range=slice(0, 0)).result(timeout=PROBE_S)
        problem = None if bucket_exists(path) else "there is no such bucket"
    except Exception as error:  # of many types
        problem = storage_problem(error) or one_line(error)[:160] or "no answer"
    if problem:
        raise UserError(
            f"{what} can't be reached ({problem}): check the name of the bucket, the network and "
            "the credentials"
        )


def bucket_exists(path: str) -> bool:
    """Whether there is the bucket of a path; for TensorStore's client one that does not exist is
    empty.
    """
    scheme, _, rest = str(path).partition("://")
    try:
        return epath.Path(f"{scheme}://{rest.partition('/')[0]}").exists()
    except Exception:  # the objects may be readable, but not what the bucket is
        return True


def limit_retries() -> None:
    """Makes TensorFlow's client give up a request after about half a minute, not after minutes.

    Call it before TensorFlow is loaded. If one in 20 requests fails, so many repetitions fail in a
    row once in 10^9.
    """
    os.environ.setdefault("GCS_RETRY_CONFIG_MAX_RETRIES", "6")
    os.environ.setdefault("GCS_RETRY_CONFIG_INIT_DELAY_TIME_US", "500000")
    os.environ.setdefault("GCS_RETRY_CONFIG_MAX_DELAY_TIME_US", "8000000")
    os.environ.setdefault("GCS_REQUEST_CONNECTION_TIMEOUT_SECS", "20")
    os.environ.setdefault("GCS_REQUEST_IDLE_TIMEOUT_SECS", "30")
