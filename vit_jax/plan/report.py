"""A plan for people: one table."""

from rich.console import Console
from rich.table import Table

UNSEEN = (
    "These are estimates of the TPU compiler and of a model of the network, not measurements: "
    "nothing ran. They do not see waiting for data, checkpoints and evaluation, stragglers, the "
    "real clock and how well transfers overlap; low is the chip's limit with all overlap, high the "
    "compiler's cycles with none. Of splash attention's kernels the compiler counts nothing: they "
    "stand with 40 % of the chip's peak."
)


def span(bracket: dict, form: str = ",.0f", unit: str = "") -> str:
    """ "12 to 34 ms" from both ends of a bracket."""
    low, high = (format(bracket[end], form) for end in ("low", "high"))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def size_rows(plan: dict) -> list[tuple[str, str]]:
    """Pod, model and memory."""
    hbm, mesh = plan["hbm_gib"], ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    slices = f", {plan['num_slices']} slices" if plan["num_slices"] > 1 else ""
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    flops = plan["model_flops_per_image"] / 1e9
    return [
        ("chips", f"{plan['num_chips']:,} ({plan['topology']}{slices})"),
        ("mesh", f"{mesh}; {plan['params_split']:.0%} of the parameters are split over chips"),
        ("model", f"{plan['params']:,} parameters, {flops:,.1f} GFLOP to train on an image"),
        ("memory", f"{verdict}: {hbm['total']:.2f} of {plan['hbm_limit_gib']:.2f} GiB per chip"),
        *(
            (f"  {kind}", f"{hbm[kind]:.3f} GiB")
            for kind in ("params", "opt_state", "activations", "batch")
        ),
    ]


def speed_rows(plan: dict) -> list[tuple[str, str]]:
    """Time, cost, and what the hosts must deliver."""
    step, percent = plan["step_ms"], {end: 100 * value for end, value in plan["mfu"].items()}
    limit, cycles = step["compute_roofline"], step["compute_estimate"]
    cores = f"{plan['host_cores']:.0f} of {plan['host_cores_available']} cores"
    return [
        ("step", span(step, ".1f", " ms")),
        (
            "  compute",
            f"{limit:.1f} ms (limit of the chip), {cycles:.1f} ms (cycles of the compiler)",
        ),
        ("  communication", f"{step['communication']:.1f} ms"),
        ("MFU", span(percent, ".1f", " %")),
        ("images/s per chip", span(plan["images_per_sec_per_chip"])),
        ("recipe", f"{plan['total_steps']:,} steps: {span(plan['days'], '.2f', ' days')}"),
        ("  chip-hours", span(plan["chip_hours"])),
        (
            "each of the hosts",
            f"{plan['hosts']}: {cores} for the data, {plan['host_network_gbps']:.1f} Gbit/s",
        ),
    ]


def rows(plan: dict) -> list[tuple[str, str]]:
    """(what, figures) of a plan; without time where there is no program."""
    compiled = (
        f"{plan['compile_s']:.0f} s, with {plan['sharding_constraints']} sharding constraints"
    )
    return [
        *size_rows(plan),
        *(speed_rows(plan) if plan["step_ms"] else ()),
        ("compiled in", compiled),
    ]


def collectives_table(plan: dict) -> Table:
    table = Table(
        "collective",
        "mesh axis",
        "count",
        "MiB per step",
        "overlapped",
        title="per chip and step",
        box=None,
    )
    for found in plan["collectives"] or ():
        size = f"{found['bytes'] / 2**20:,.1f}"
        table.add_row(
            found["kind"],
            found["axis"],
            str(found["count"]),
            size,
            "yes" if found["overlapped"] else "no",
        )
    return table


def outcome(tried: dict) -> str:
    """ "12 to 34 ms, 9.50 GiB per chip: --config.…" for one of the settings of a search."""
    if "error" in tried:
        return f"failed ({tried['error']}): {tried['settings']}"
    step = span(tried["step_ms"], ".0f", " ms") if tried["fits"] else "does not fit"
    return f"{step}, {tried['hbm_gib']:.2f} GiB per chip: {tried['settings']}"


def show(plan: dict) -> None:
    """Prints a plan."""
    console, table = Console(width=120, highlight=False), Table(show_header=False, box=None)
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
        console.print(f"would fit: {text}" if text.startswith("--") else text, soft_wrap=True)
    console.print(UNSEEN)
