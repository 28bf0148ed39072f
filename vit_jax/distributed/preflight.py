"""The preflight: before any device computes, all processes check that they are about to do the
same thing.
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
from vit_jax.config import own_parts
from vit_jax.distributed import messages, processes, versions
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


def check(facts: Mapping[str, object], folder: epath.Path | None = None) -> None:
    """Checks that all processes have the same facts; does nothing for a single process.

    If one differs, all raise a UserError that names the process and what differs.

    Args:
      facts: what must be the same everywhere besides code, versions and devices: a config by key,
        fingerprints. Keys of the machine are left out.
      folder: exists, and must be one folder that all share, not one of this name on each host.
    """
    if jax.process_count() == 1:
        return
    num_local = jax.local_device_count()
    log.info(
        "process %d of %d, coordinator at %s, %d local devices of %d",
        jax.process_index(),
        jax.process_count(),
        messages.leader_address(),
        num_local,
        jax.device_count(),
    )
    same = {key: repr(facts[key]) for key in sorted(facts) if not configs.may_differ_by_host(key)}
    same |= versions.versions() | dict(commit=versions.commit(), code=versions.code())
    same |= own_parts.code()
    same["devices"] = f"{num_local} of kind {jax.local_devices()[0].device_kind}"
    if folder is None:
        compare(same)
    else:
        compare_in(folder, same)


def compare_in(folder: epath.Path, facts: dict[str, str]) -> None:
    """`compare`, while a file of process 0 shows whether the others see the same folder."""
    address = re.sub("[^a-zA-Z0-9]", "_", messages.leader_address())
    mark = folder / f".led_by_{address}"
    is_leader = jax.process_index() == 0
    if is_leader:
        mark.write_text(f"shared since {time.time_ns()}")
    try:
        messages.all_gather("the start", "", processes.start_timeout())
        seen = mark.read_text() if mark.exists() else f"{folder} is not shared with process 0"
        compare(facts | {"--workdir": seen})
    finally:
        if is_leader:
            mark.unlink()


def compare(facts: dict[str, str]) -> None:
    """Raises UserError on all processes if one has other facts than most; with two, process 1 is
    reported.
    """
    seconds = processes.start_timeout()
    text = json.dumps(facts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = messages.all_gather("the start", digest, seconds)
    if len(set(digests)) == 1:
        return
    most_common = collections.Counter(digests).most_common(1)[0][0]
    usual = digests.index(most_common)
    first, *more = [i for i, digest in enumerate(digests) if digest != most_common]
    texts = messages.all_gather("the start", text, seconds)
    details = differences(json.loads(texts[usual]), json.loads(texts[first]))
    if more:
        details += f"; processes {', '.join(map(str, more))} differ, too"
    raise UserError(
        f"process {first} differs from process {usual} ({details}): start all processes with the "
        "same command, code and data"
    )


def differences(one: Mapping[str, str], two: Mapping[str, str]) -> str:
    keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    return "; ".join(
        f"{key}: {one.get(key, '(unset)')} -> {two.get(key, '(unset)')}" for key in keys
    )
