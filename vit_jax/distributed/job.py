"""Which job this process belongs to: by VIT_JAX_* variables, or by the cluster that JAX detects."""

import dataclasses
import ipaddress
import os
import re
import socket

from vit_jax.errors import UserError

COORDINATOR = "VIT_JAX_COORDINATOR"
COUNT = "VIT_JAX_NUM_PROCESSES"
INDEX = "VIT_JAX_PROCESS_ID"
VARIABLES = (COORDINATOR, COUNT, INDEX)
START_TIMEOUT = "VIT_JAX_START_TIMEOUT"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"

# Since 0.8.1 JAX's coordinator listens on 8482 on TPUs, which Google Cloud's automatic firewall
# rule for TPU VMs does not open; it opens 8470, 8471, 8474, 8476 and 11211
# (https://github.com/jax-ml/jax/issues/35905).
TPU_PORT = "8476"
SLICES = "MEGASCALE_NUM_SLICES"
SLICE = "MEGASCALE_SLICE_ID"
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", SLICES, SLICE)


@dataclasses.dataclass(frozen=True)
class Job:
    """Where process 0 is, and which process this is."""

    address: str  # "HOST:PORT" of process 0
    count: int
    index: int
    detected: bool = False  # by JAX, which then also chooses the devices of this process
    hint: str = ""  # what else may be wrong if the others do not come


def explicit() -> Job | None:
    """The job that VIT_JAX_* describe; None if none of them is set."""
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not values:
        return None
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        values.setdefault(COORDINATOR, os.environ["JAX_COORDINATOR_ADDRESS"])
    missing = [name for name in VARIABLES if name not in values]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set in the environment: set all of {', '.join(VARIABLES)}"
        )
    try:
        count = int(values[COUNT])
        index = int(values[INDEX])
    except ValueError:
        raise UserError(
            f"{COUNT} and {INDEX} in the environment must be whole numbers: correct them"
        ) from None
    if not 0 <= index < count:
        raise UserError(
            f"{INDEX}={index} is not below {COUNT}={count} in the environment: correct them"
        )
    address = values[COORDINATOR]
    check_address(COORDINATOR, address)
    check_multislice()
    return Job(address, count, index, hint=multislice_hint())


def check_address(name: str, address: str) -> None:
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise UserError(
            f"{name}={address} in the environment is not HOST:PORT: give host and port of process 0"
        )


def bind_address(address: str) -> str:
    """Where process 0 listens: at its own address alone if that is one of this machine, because
    whoever can connect can stop the job; else on all interfaces.
    """
    if os.environ.get(BIND):
        check_address(BIND, os.environ[BIND])
        return os.environ[BIND]
    host, port = address.rsplit(":", 1)
    found = own_address(host.strip("[]")) or "::"
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def own_address(host: str) -> str | None:
    """The address of this machine that all machines mean by `host`; None if that is not certain."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = sorted({info[4][0] for info in infos})
    # A machine's own name is often 127.0.1.1 to itself, and may stand for several networks, not all
    # of which reach the others.
    is_loopback = ipaddress.ip_address(addresses[0].split("%")[0]).is_loopback
    if host not in ("localhost", *addresses) and (len(addresses) > 1 or is_loopback):
        return None
    return next(filter(is_ours, addresses), None)


def is_ours(address: str) -> bool:
    """Whether a numeric address is one of this machine, not that of a router or load balancer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def detect(seconds: int) -> Job | None:
    """The job of the cluster that JAX detects; None if there is none.

    It may wait up to `seconds` for the cluster to name process 0, and raises whatever JAX raises
    if the cluster's variables are wrong.
    """
    # No public API says which cluster it is.
    from jax._src import clusters

    found = (
        cluster
        for cluster in clusters.ClusterEnv._cluster_types
        if not cluster.opt_in_only_method and cluster.is_env_present()
    )
    cluster = next(found, None)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if cluster is None and address:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address} is set, but there is no cluster")
    if cluster is None:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    hint = ""
    if issubclass(cluster, clusters.cloud_tpu_cluster.BaseTpuCluster):
        check_multislice()
        hint = multislice_hint(machine_says(cluster))
        address = address or f"{tpu_leader(cluster)}:{port or TPU_PORT}"
    if not address:
        address = cluster.get_coordinator_address(
            timeout_secs=seconds, override_coordinator_port=port
        )
    return Job(address, cluster.get_process_count(), cluster.get_process_id(), True, hint)


def tpu_leader(cluster) -> str:
    """The host of process 0 on TPUs. JAX's own function waits in silence for its name to
    resolve.
    """
    from jax._src.clusters.cloud_tpu_cluster import get_tpu_env_value

    host = get_tpu_env_value(MEGASCALE[0]) or cluster._get_worker_list_in_slice()[0]
    return host.split(":")[0]


def machine_says(cluster) -> dict[str, str]:
    """The multislice variables by the metadata of a TPU VM; {} if it has none, or elsewhere."""
    from jax._src.clusters import cloud_tpu_cluster

    if not issubclass(cluster, cloud_tpu_cluster.GceTpuCluster):
        return {}
    value = cloud_tpu_cluster.get_tpu_env_value_from_metadata
    return {name: value(name) or "" for name in MEGASCALE}


def check_multislice() -> None:
    """Raises UserError if MEGASCALE_* contradict each other."""
    slices = os.environ.get(SLICES, "1")
    number = os.environ.get(SLICE, "0")
    if slices.isdecimal() and number.isdecimal() and int(number) < int(slices):
        return
    raise UserError(
        f"{SLICE}={number} is not below {SLICES}={slices} in the environment: unset "
        f"{', '.join(MEGASCALE)} if they are left from an earlier job, or correct them"
    )


def multislice_hint(machine: dict[str, str] | None = None) -> str:
    """What MEGASCALE_* in the environment make this process expect: left from an earlier job, as
    after a preemption, they make it wait for slices that no longer exist.
    """
    values = {name: os.environ[name] for name in MEGASCALE if name in os.environ}
    if not values:
        return ""
    said = ", ".join(f"{name}={value}" for name, value in values.items())
    missing = [name for name in MEGASCALE if name not in values and not (machine or {}).get(name)]
    wrong = ""
    if missing:
        wrong = f", without {', '.join(missing)}"
    for name, value in values.items():
        if machine and machine[name] != value:
            wrong += f"; this machine's metadata have {name}={machine[name] or '(unset)'}"
    return (
        f"; the environment has {said}{wrong}: unset {', '.join(values)} if they are left from an "
        "earlier job"
    )


def seconds_from_environment(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{name}={text} in the environment is not a number of seconds: give a whole number "
            "above 0"
        )
    return int(text)
