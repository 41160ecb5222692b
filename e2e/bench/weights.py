"""`e2e/bench/run weights`: in-flight updates of a live generator, against a raw broadcast of the
same bytes.

The bench is the trainer: it sends a model's weights over gloo on the loopback interface to the
product's generator process, which decodes all the while. Rounds take both modes at both paces in
turn, each beside a raw broadcast: the same buckets at the same pace to a process that only
receives, in a process group made the same way, while the generator decodes as well. Medians count.

`pause_over_transfer` is the pause over the transfer's time. `total_over_broadcast` is
total / (broadcast + apply): an update has to move the bytes and to load them into the model, so 1
means that it does nothing else, and less than 1 that it does both concurrently.
`beside_apply_over_broadcast`, (total - apply) / broadcast, is the same without the model's loading.

`sharded` is apart from these: an update from four trainer ranks to four generators of two workers
over paced links, see weights_sharded.py.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from bench import weights_sharded
from bench.report import Report, Row, Value, at_most, progress
from bench.weights_generator import MEGABYTE, make_model, running_generator
from bench.weights_transfer import Mirror, Trainer, Update, read_snapshot
from pipelinerl_common.errors import SettingsError

TITLE = "In-flight weight updates against a raw broadcast"
MODES: tuple[Literal["staged"], Literal["inplace"]] = ("staged", "inplace")


@dataclass
class Measured:
    """Updates of one mode at one pace, and the raw broadcast that was timed beside each."""

    updates: list[Update] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)

    def values(self, num_bytes: int) -> dict[str, Value]:
        """Medians over the rounds; times in seconds."""
        pairs = list(zip(self.updates, self.broadcasts, strict=True))
        return {
            "pause_over_transfer": median(
                update.pause_s / update.transfer_s for update in self.updates
            ),
            "total_over_broadcast": median(
                update.total_s / (broadcast + update.apply_s) for update, broadcast in pairs
            ),
            "beside_apply_over_broadcast": median(
                (update.total_s - update.apply_s) / broadcast for update, broadcast in pairs
            ),
            "pause_seconds": median(update.pause_s for update in self.updates),
            "apply_seconds": median(update.apply_s for update in self.updates),
            "transfer_seconds": median(update.transfer_s for update in self.updates),
            "total_seconds": median(update.total_s for update in self.updates),
            "broadcast_seconds": median(self.broadcasts),
            "num_running": min(update.num_running for update in self.updates),
            "bytes": num_bytes,
        }


def bench(args: argparse.Namespace) -> Report:
    """Runs the bench on `args.model` or on a random model of `args.megabytes`."""
    if args.model is not None and not (args.model / "config.json").is_file():
        raise SettingsError(
            f"--model {args.model}: no config.json in it; give a folder in Hugging Face format"
        )
    megabytes, rounds = (args.megabytes // 4, 1) if args.quick else (args.megabytes, args.rounds)
    sharded = weights_sharded.measure(20 if args.quick else args.sharded_megabytes, rounds)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-bench-") as name:
        folder = Path(name)
        if args.model is None:
            progress(f"making a model of {megabytes} MB")
            make_model(folder / "model", megabytes, args.seed)
        else:
            (folder / "model").symlink_to(args.model.resolve())
        report = asyncio.run(_bench(args, folder, rounds))
    return Report(
        report.title,
        {**report.values, "sharded": sharded},
        (*report.rows, *weights_sharded.rows(sharded)),
    )


async def _bench(args: argparse.Namespace, folder: Path, rounds: int) -> Report:
    snapshot = read_snapshot(folder / "model")
    paces = {"paced": float(args.pace * MEGABYTE), "unpaced": None}
    measured = {pace: {mode: Measured() for mode in MODES} for pace in paces}
    progress("starting the generator")
    async with (
        running_generator(folder, args.engine, args.requests) as generator,
        Trainer.joined(generator.client, snapshot) as trainer,
        Mirror.joined(snapshot) as mirror,
        generator.busy(args.requests),
    ):
        for mode in MODES:  # the first of everything pays for memory that is touched the first time
            await generator.wait_until_running(args.requests)
            await trainer.update(mode, None)
            await mirror.send(None)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for pace, mode in ((pace, mode) for pace in paces for mode in MODES):
                await generator.wait_until_running(args.requests)
                measured[pace][mode].updates.append(await trainer.update(mode, paces[pace]))
                measured[pace][mode].broadcasts.append(await mirror.send(paces[pace]))
    values: dict[str, dict[str, dict[str, Value]]] = {
        pace: {mode: measured[pace][mode].values(snapshot.num_bytes) for mode in MODES}
        for pace in paces
    }
    return Report(TITLE, {**values, "rounds": rounds, "engine": args.engine}, tuple(_rows(values)))


def _rows(values: dict[str, dict[str, dict[str, Value]]]) -> Sequence[Row]:
    def number(pace: str, mode: str, key: str) -> float:
        value = values[pace][mode][key]
        assert isinstance(value, int | float)
        return value

    half = number("unpaced", "inplace", "pause_seconds")
    rows = [
        at_most(
            "paced staged: pause / transfer", number("paced", "staged", "pause_over_transfer"), 0.10
        ),
        at_most(
            "unpaced staged: total / (broadcast + apply)",
            number("unpaced", "staged", "total_over_broadcast"),
            1.3,
        ),
        at_most(
            "unpaced: staged pause / in-place pause",
            number("unpaced", "staged", "pause_seconds") / half,
            0.5,
        ),
    ]
    for pace, mode in ((pace, mode) for pace in values for mode in MODES):
        seconds = {
            key: number(pace, mode, f"{key}_seconds")
            for key in ("pause", "transfer", "apply", "total", "broadcast")
        }
        parts = " / ".join(f"{seconds[key]:.3f}" for key in ("pause", "transfer", "apply"))
        rows.append(
            Row(
                f"{pace} {mode}: total",
                f"{seconds['total']:.3f} s",
                f"{seconds['broadcast']:.3f} s",
            )
        )
        rows.append(Row("  pause / transfer / apply", f"{parts} s"))
    return rows
