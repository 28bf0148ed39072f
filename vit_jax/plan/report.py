"""Prints a plan as text."""

from rich.table import Table

from vit_jax.cli.terminal import Console

UNSEEN = (
    "These are estimates by the TPU compiler and a model of the network, not measurements: nothing "
    "was run. They do not include waiting for data, checkpoints and evaluation, stragglers, the "
    "real clock rate, or how well transfers overlap: low is the chip's limit with full overlap, "
    "high is the compiler's cycle count with none. The compiler does not count the kernels of "
    "attention: those of short sequences take the bundles that it schedules for them, without "
    "stalls, and splash attention is assumed to reach 40 % of the chip's peak."
)


def span(ends: dict, form: str = ",.0f", unit: str = "") -> str:
    """The text of a range: "12 to 34 ms"."""
    low = format(ends["low"], form)
    high = format(ends["high"], form)
    if low == high:
        return f"{low}{unit}"
    return f"{low} to {high}{unit}"


def size_rows(plan: dict) -> list[tuple[str, str]]:
    """Pod, model and memory."""
    hbm = plan["hbm_gib"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    pod = plan["topology"]
    if plan["num_slices"] > 1:
        pod += f", {plan['num_slices']} slices"
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    flops = plan["model_flops_per_image"] / 1e9
    kinds = [kind for kind in hbm if kind != "total"]
    return [
        ("chips", f"{plan['num_chips']:,} ({pod})"),
        ("mesh", f"{mesh}; {plan['params_split']:.0%} of the parameters are split over chips"),
        ("model", f"{plan['params']:,} parameters, {flops:,.1f} GFLOP per training image"),
        ("memory", f"{verdict}: {hbm['total']:.2f} of {plan['hbm_limit_gib']:.2f} GiB per chip"),
        *((f"  {kind}", f"{hbm[kind]:.3f} GiB") for kind in kinds),
    ]


def speed_rows(plan: dict) -> list[tuple[str, str]]:
    """Time, cost, and what the hosts must deliver."""
    step = plan["step_ms"]
    limit = f"{step['compute_roofline']:.1f} ms (limit of the chip)"
    cycles = f"{step['compute_estimate']:.1f} ms (cycles of the compiler)"
    percent = {end: 100 * value for end, value in plan["mfu"].items()}
    cores = f"{plan['host_cores']:.0f} of {plan['host_cores_available']} cores"
    network = f"{plan['host_network_gbps']:.1f} Gbit/s"
    return [
        ("step", span(step, ".1f", " ms")),
        ("  compute", f"{limit}, {cycles}"),
        ("  communication", f"{step['communication']:.1f} ms"),
        ("MFU", span(percent, ".1f", " %")),
        ("images/s per chip", span(plan["images_per_sec_per_chip"])),
        ("recipe", f"{plan['total_steps']:,} steps: {span(plan['days'], '.2f', ' days')}"),
        ("  chip-hours", span(plan["chip_hours"])),
        ("hosts", f"{plan['hosts']}; each needs {cores} and {network} for the data"),
    ]


def rows(plan: dict) -> list[tuple[str, str]]:
    """(name, figures) of a plan; without times if nothing could be compiled."""
    found = size_rows(plan)
    if plan["step_ms"]:
        found += speed_rows(plan)
    constraints = f"{plan['sharding_constraints']} sharding constraints"
    cached = ", before: this is from the cache" * plan["compile_cached"]
    found.append(("compiled in", f"{plan['compile_s']:.0f} s{cached}, with {constraints}"))
    return found


def collectives_table(plan: dict) -> Table:
    columns = ("collective", "mesh axis", "count", "MiB per step", "overlapped")
    table = Table(*columns, title="per chip and step", box=None)
    for found in plan["collectives"]:
        size = f"{found['bytes'] / 2**20:,.1f}"
        overlapped = "yes" if found["overlapped"] else "no"
        table.add_row(found["kind"], found["axis"], str(found["count"]), size, overlapped)
    return table


def outcome(tried: dict) -> str:
    """A line for one of the settings of a search: "12 to 34 ms, 9.50 GiB per chip: --config.…"."""
    if "error" in tried:
        return f"failed ({tried['error']}): {tried['settings']}"
    step = "does not fit"
    if tried["fits"]:
        step = span(tried["step_ms"], ".0f", " ms")
    return f"{step}, {tried['hbm_gib']:.2f} GiB per chip: {tried['settings']}"


def show(plan: dict) -> None:
    """Prints a plan."""
    console = Console(width=120, highlight=False)
    table = Table(show_header=False, box=None)
    for row in rows(plan):
        table.add_row(*row)
    console.print(f"{plan['config']} on {plan['topology']}")
    console.print(table)
    if plan["collectives"]:
        console.print(collectives_table(plan))
    for number, tried in enumerate(plan.get("tried", ()), 1):
        console.print(f"{number}. {outcome(tried)}", soft_wrap=True)
    if "tried" in plan and plan["fits"]:
        console.print(f"best: {plan['settings']}", soft_wrap=True)
    for text in plan["suggestions"]:
        if text.startswith("--"):
            text = f"would fit: {text}"
        console.print(text, soft_wrap=True)
    console.print(UNSEEN)
