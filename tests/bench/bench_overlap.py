"""How much of what the arithmetic promises does explicit forward prefetch gain, and how good was the prediction?

    python tests/bench/bench_overlap.py [--rounds 3] [--steps 10] [--json]

Prefetch off and on are measured in turn, so that both see the same machine; ratios, not times, are what to compare.
"""

from __future__ import annotations

import argparse
import json
import statistics

from rich.console import Console
from rich.table import Table

from fsdp_sim.timeline.analysis import median_step, step_time_s
from labs.experiments.prefetch import Experiment, hideable_s, same_order, training_only


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps per run (default 10)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    experiment = Experiment()
    rows = []
    for _ in range(arguments.rounds):
        pieces = experiment.measure_pieces(arguments.steps, progress=False)
        row = {"promised_s": hideable_s(pieces)}
        for depth in (None, 1):
            predicted = experiment.predict(pieces, forward_prefetch=depth)
            measured = training_only(experiment.run(arguments.steps, forward_prefetch=depth, progress=False).timeline)
            assert same_order(predicted, measured)
            name = "off" if depth is None else "on"
            row[f"predicted_{name}_s"] = step_time_s(predicted, median_step(predicted))
            row[f"measured_{name}_s"] = step_time_s(measured, median_step(measured))
        row["gained"] = (row["measured_off_s"] - row["measured_on_s"]) / row["promised_s"]
        for name in ("off", "on"):
            row[f"error_{name}"] = row[f"predicted_{name}_s"] / row[f"measured_{name}_s"] - 1
        rows.append(row)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    if arguments.json:
        print(json.dumps({"rounds": rows, "median": medians}))
        return
    table = Table("", *(f"round {i + 1}" for i in range(len(rows))), "median")
    for key in medians:
        show = (lambda v: f"{v * 1e3:.0f} ms") if key.endswith("_s") else (lambda v: f"{v:+.0%}")
        table.add_row(key.removesuffix("_s"), *(show(row[key]) for row in rows), show(medians[key]))
    Console().print(table)


if __name__ == "__main__":
    main()
