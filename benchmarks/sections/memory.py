"""Peak memory beyond plain DDP."""

from sections import Records, provenance, table


def newest(records: Records) -> dict[str, dict[str, dict[str, float]]]:
    """By model and contender, from the newest record of the model."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for record in records.get("memory", []):
        for result in record["results"]:
            found.setdefault(result["model"], result["contenders"])
    return dict(sorted(found.items()))


def text(records: Records) -> str | None:
    """A row for each model and contender."""
    models = newest(records)
    if not models:
        return None
    rows = [
        [
            model,
            f"`{name}`",
            f"{sizes['peak_rss_bytes'] / 1e6:.0f}",
            f"{sizes['gradient_bytes'] / 1e6:.0f}",
            "" if name == "ddp" else f"{sizes['beyond_ddp_over_gradient_bytes']:.2f}",
        ]
        for model, contenders in models.items()
        for name, sizes in contenders.items()
    ]
    return (
        "## Memory\n\nLargest resident size of a worker over a few steps, each contender in processes of its own.\n\n"
        + table(["model", "contender", "peak, MB", "gradients, MB", "beyond DDP, in gradient sizes"], rows)
        + f"\nMeasured: {provenance(records['memory'][0])}.\n"
    )
