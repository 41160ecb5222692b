"""How the actor's generators do: asked every second, told to the preprocessor, whose policy may
adapt to it.
"""

import asyncio
import logging
from collections.abc import Sequence

from pipelinerl.v1.admission_pb2 import GeneratorLoad
from pipelinerl_actor.rollout.admission import Reports
from pipelinerl_actor.rollout.generator_client import GeneratorClient
from pipelinerl_actor.rollout.generators import Generators
from pipelinerl_common.errors import PipelineRLError

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_ANSWER_S = 2.0


class LoadWatch:
    """A generator that does not answer in time is left out, so nothing is said of it."""

    def __init__(
        self, clients: Sequence[GeneratorClient], generators: Generators, reports: Reports
    ) -> None:
        self._clients = clients
        self._generators = generators
        self._reports = reports

    async def run(self) -> None:
        """Consumes the generators' answers, produces reports; waits for answers and its period,
        never ends.
        """
        while True:
            answers = await asyncio.gather(*map(self._ask, self._clients))
            if loads := [load for load in answers if load is not None]:
                self._reports.add_loads(loads)
            await asyncio.sleep(_PERIOD_S)

    async def _ask(self, client: GeneratorClient) -> GeneratorLoad | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                load = await client.load()
                load.requested_seconds_total, load.answered_total = self._generators.tally(
                    client.url
                )
                return load
        except (PipelineRLError, TimeoutError) as error:
            log.debug("generator=%s tells no load: %s", client.url, error)
            return None
