"""Codecs by shape and rank."""

from typing import Any

from sections import Record, Records, provenance, table


def text(records: Records) -> str | None:
    """Time, error and bytes of each codec, and the products' floor."""
    if not records.get("codec"):
        return None
    record = records["codec"][0]
    rows = [_row(row) for row in record["results"]]
    header = [
        "codec", "gradient", "rank", "ms", "ms with error feedback", "three products, ms", "over the products",
        "with error feedback", "relative error", "best possible", "kB",
    ]  # fmt: skip
    return (
        "## Codecs\n\n"
        "Compression and decompression of one gradient on one thread, without any exchange; median, and in brackets "
        "minimum..maximum. The floor is the codec's three matrix products (M Q, P^T M, P Q^T), timed in turn with it. "
        "The matrices have singular values i^-0.7 and 2 % of noise; the relative error is without error feedback, "
        "after a few warm-started rounds; `best possible` is that of the truncated SVD.\n\n"
        + table(header, rows)
        + "\n![codec over its products](plots/codec.png)\n\n"
        + f"Measured: {provenance(record)}.\n"
    )


def figures(records: Records) -> dict[str, Any]:
    """Time over the products', by rank."""
    if not records.get("codec"):
        return {}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, int, int], list[Record]] = {}
    for row in records["codec"][0]["results"]:
        if row["rank"] is not None:
            lines.setdefault((row["codec"], row["rows"], row["cols"]), []).append(row)
    for (name, rows, cols), points in lines.items():
        ranks, over = [row["rank"] for row in points], [row["codec_over_floor"] for row in points]
        axes.plot(ranks, over, marker="o", markersize=4, label=f"{name}, {rows} x {cols}")
    axes.axhline(1.5, color="0.4", linestyle=":", linewidth=1)
    axes.annotate("target", (1.0, 1.5), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["rank"] for points in lines.values() for row in points})
    axes.set_xticks(ticks, [str(rank) for rank in ticks])
    axes.set(xlabel="rank", ylabel="time over that of the three products", title="Codec on one thread", ylim=(0, None))
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return {"codec.png": figure}


def _row(row: Record) -> list[str]:
    def ms(key: str) -> str:
        times = row.get(key)
        if times is None:
            return ""
        return f"{times['median'] * 1e3:.2f} ({times['min'] * 1e3:.2f}..{times['max'] * 1e3:.2f})"

    def number(key: str, digits: int) -> str:
        return "" if row.get(key) is None else f"{row[key]:.{digits}f}"

    return [
        f"`{row['codec']}`",
        f"{row['rows']} x {row['cols']}",
        number("rank", 0),
        ms("codec_s"),
        ms("codec_feedback_s"),
        ms("floor_s"),
        number("codec_over_floor", 2),
        number("codec_feedback_over_floor", 2),
        number("relative_error", 4),
        number("optimal_error", 4),
        f"{row['wire_bytes'] / 1e3:.1f}",
    ]
