"""The preflight of several processes: before any device computes, all find that they are about to
do the same.
"""

import collections
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping

import jax
from etils import epath

from vit_jax import config as configs
from vit_jax.distributed import messages, processes, versions
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


def check(facts: Mapping[str, object], folder: epath.Path | None = None) -> None:
    """Makes sure, once at the start, that all processes do the same; does nothing in a single one.

    Args:
      facts: what must be the same everywhere beside code, versions and devices: a config by key,
        fingerprints. Keys of the machine are left out.
      folder: exists, and must be one folder for all, not one of this name on each host.

    Raises:
      UserError: on all processes, if one differs; it names the process and the facts.
    """
    if jax.process_count() == 1:
        return
    index, address = jax.process_index(), messages.leader_address()
    count, local = jax.process_count(), jax.local_device_count()
    log.info(
        "process %d of %d, led by process 0 at %s, %d local devices of %d",
        *(index, count, address, local, jax.device_count()),
    )
    same = {key: repr(facts[key]) for key in sorted(facts) if not configs.may_differ_by_host(key)}
    same |= versions.versions() | dict(commit=versions.commit(), code=versions.code())
    same["devices"] = f"{local} of kind {jax.local_devices()[0].device_kind}"
    if folder is None:
        return compare(same)
    mark = folder / f".led_by_{re.sub('[^a-zA-Z0-9]', '_', address)}"
    if index == 0:
        mark.write_text(str(time.time_ns()))
    try:
        messages.all_gather("the start", "", processes.timeout())
        compare(
            same
            | {"--workdir": mark.read_text() if mark.exists() else f"{folder} of this host alone"}
        )
    finally:
        if index == 0:
            mark.unlink()


def compare(facts: dict[str, str]) -> None:
    """Raises UserError on all processes, if one has other facts than most; of two, process 1 is the
    odd one.
    """
    text = json.dumps(facts)
    digests = messages.all_gather(
        "the start", hashlib.sha256(text.encode()).hexdigest(), processes.timeout()
    )
    if len(set(digests)) == 1:
        return
    usual = digests.index(collections.Counter(digests).most_common(1)[0][0])
    odd = [i for i, digest in enumerate(digests) if digest != digests[usual]]
    all_facts = [
        json.loads(other) for other in messages.all_gather("the start", text, processes.timeout())
    ]
    others = f"; nor do processes {', '.join(map(str, odd[1:]))}" if odd[1:] else ""
    raise UserError(
        f"process {odd[0]} does not do what process {usual} does "
        f"({differences(all_facts[usual], all_facts[odd[0]])}{others}): start all processes with "
        "the same command, code and data"
    )


def differences(one: Mapping[str, str], two: Mapping[str, str]) -> str:
    keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    return "; ".join(
        f"{key}: {one.get(key, '(unset)')} -> {two.get(key, '(unset)')}" for key in keys
    )
