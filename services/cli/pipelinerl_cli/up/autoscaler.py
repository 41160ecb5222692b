"""`autoscale` in a run on this machine: the choice is the operator's own, what is done about it is
`fleet`'s.

```
 every 2 s:  /metrics of trainer-0 and preprocessor-0 -> look -> autoscale.json -> display -> fleet.resize
```
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from pipelinerl_cli.up.fleet import Fleet
from pipelinerl_cli.up.supervisor import Supervisor
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.files import write_whole
from pipelinerl_common.settings import JobSpec
from pipelinerl_operator.coordinator import Coordinator
from pipelinerl_operator.plan import Endpoints
from pipelinerl_operator.scaling.balance import Counts
from pipelinerl_operator.scaling.choice import Choice, look, num_actors
from pipelinerl_operator.scaling.metrics import Scale
from pipelinerl_operator.scaling.period import Period
from pipelinerl_operator.scaling.reading import read_metrics

log = logging.getLogger(__name__)

READ_S = 2.0
TRAINER, PREPROCESSOR = "trainer-0", "preprocessor-0"


class ChoiceFile:
    """What was chosen, for the next session of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Choice | None:
        """None without one. Raises SettingsError when it cannot be read."""
        try:
            return Choice.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise SettingsError(
                f"{self._path}: cannot be read: {error}; remove it, and the choice begins again "
                "from actors.replicas"
            ) from error

    def write(self, choice: Choice) -> None:
        write_whole(self._path, choice.model_dump_json(by_alias=True) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class Autoscaler:
    """Of one session. Switched off it keeps the number that the job file asks for."""

    def __init__(self, spec: JobSpec, file: ChoiceFile, note: Callable[[str], None]) -> None:
        self._spec = spec
        self._file = file
        self._note = note
        self._period = Period()
        if not spec.autoscale.enabled:
            file.remove()
        self._choice = file.read()

    @property
    def num_actors(self) -> int:
        """That there should be."""
        return num_actors(self._spec, self._choice)

    def scale(self, num_ready: int) -> Scale:
        return Scale(
            self.num_actors, num_ready, None if self._choice is None else self._choice.ratio
        )

    async def run(
        self, fleet: Fleet, endpoints: Endpoints, supervisor: Supervisor, coordinator: Coordinator
    ) -> None:
        """For ever. Consumes the metrics of the run, produces choices, waits for the next reading
        and for who is let go.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True)
        ) as session:
            while True:
                actors = fleet.ready(supervisor, coordinator)
                others = tuple(
                    f"{name}/{process.pid}"
                    for name, process in supervisor.running.items()
                    if name in (TRAINER, PREPROCESSOR)
                )
                trainer = await read_metrics(session, endpoints.metrics_addresses[TRAINER])
                preprocessor = await read_metrics(
                    session, endpoints.metrics_addresses[PREPROCESSOR]
                )
                if trainer is not None and preprocessor is not None:
                    self.look(Counts.of(trainer, preprocessor, actors, others))
                if fleet.size != self.num_actors:
                    await fleet.resize(self.num_actors, supervisor, coordinator)
                await asyncio.sleep(READ_S)

    def look(self, counts: Counts | None) -> None:
        """Takes a reading, and chooses when it is time. The choice is written before it is acted
        on.
        """
        self._period.take(counts, None if self._choice is None else self._choice.step)
        looked = look(
            self._spec, self._choice, None if counts is None else counts.step, self._period.balance
        )
        if looked is None:
            return
        try:
            self._file.write(looked.choice)
        except OSError as error:  # a full disk; it is looked at again with the next reading
            log.warning(
                "actors stay %d, what was chosen cannot be written: %s", self.num_actors, error
            )
            return
        self._choice = looked.choice
        self._period.begin_anew()
        if looked.why:
            log.info("%s", looked.why)
            self._note(looked.why)
