"""A validation for people and for programs."""

import json
from dataclasses import asdict

from pipelinerl_common.words import counted
from pipelinerl_planner.validation import Validation


def validation_table(validation: Validation) -> str:
    run, outcome = validation.run, validation.outcome
    rows = [("", "measured", "simulated", "difference")]
    for one in validation.comparisons:
        unit = f" {one.unit}" if one.unit else ""
        rows.append(
            (
                one.quantity,
                f"{one.measured:.2f}{unit}",
                f"{one.simulated:.2f}{unit}",
                f"{100 * one.difference:+.1f} %",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        "  ".join(
            t.ljust(w) if i == 0 else t.rjust(w)
            for i, (t, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in rows
    ]
    steps, groups = counted(run.num_steps, "step"), counted(run.groups_per_step, "group")
    head = f"{run.policy}: {steps} of {groups}; largest lag {outcome.max_staleness} (simulated)"
    lost = (
        [f"{counted(run.num_lost, 'group')} failed or filtered; the simulation has none of these"]
        if run.num_lost
        else []
    )
    return "\n".join(
        [
            head,
            *table,
            "fitted to the run's parts: lengths, decode steps, requests, training steps, "
            "publishes, pauses; "
            "none of the rows above",
            *lost,
        ]
    )


def validation_json(validation: Validation) -> str:
    run = validation.run
    document = {
        "policy": run.policy,
        "settings": asdict(run.settings),
        "num_steps": run.num_steps,
        "num_lost": run.num_lost,
        "comparisons": [
            {**asdict(one), "difference": one.difference} for one in validation.comparisons
        ],
        "cost_model": asdict(validation.cluster),
    }
    return json.dumps(document, indent=1)
