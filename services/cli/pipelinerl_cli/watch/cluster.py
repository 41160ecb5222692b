"""A PipelineRLJob in a cluster: its status, read with kubectl and its configuration."""

import json
import math
import re
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_cli.up.display import (
    LEAST_SPARKS,
    duration,
    framed,
    labelled,
    number,
    sparkline,
)
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.text import counted, did_you_mean_folder

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

RESOURCE = "pipelinerljobs.pipelinerl.dev"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
KUBECTL_S = 20.0
KEPT_LOOKS = 60
TEXT_COLUMNS = 44
ROLES = ("actors", "preprocessor", "trainers", "reference", "evaluator")
TRAINING = (
    ("reward", "reward", 3),
    ("lag", "lag", 2),
    ("ESS", "ess", 3),
    ("samples/s", "samplesPerSecond", 1),
)
"""Label, field of status.training, digits."""
ENDED = ("Succeeded", "Failed")
_BAD = ("Degraded", "Failed", "Suspended")
"""Conditions that ask for attention while they are true."""
_MOMENTS = ("Succeeded", "Evaluating")
"""Conditions that are no cause for concern while they are false."""


class ClusterJob:
    """A job as the cluster's API shows it. The operator writes its numbers into the status at most
    every 15 seconds, so they are not newer than that.
    """

    interval_s = 5.0

    def __init__(self, name: str, get: Sequence[str]) -> None:
        self._name = name
        self._get = get
        self._job: dict[str, Any] = {}
        self._step = -1
        self._trends: dict[str, deque[float]] = {
            field: deque(maxlen=KEPT_LOOKS) for _, field, _ in TRAINING
        }
        self._trouble = ""

    @classmethod
    def named(cls, name: str, *, namespace: str | None, context: str | None) -> "ClusterJob":
        """Raises SettingsError when `name` cannot be a job's name."""
        if not NAME.fullmatch(name):
            raise SettingsError(
                f"{name}: neither a folder nor the name of a job (lower-case letters, digits and "
                f"'-', at most 40){did_you_mean_folder(Path(name))}"
            )
        timeout = f"--request-timeout={KUBECTL_S / 2:g}s"
        get = ["kubectl", "get", RESOURCE, name, "--output=json", timeout]
        get += [f"--namespace={namespace}"] if namespace else []
        get += [f"--context={context}"] if context else []
        return cls(name, get)

    def look(self) -> Sequence[str]:
        """A line when the step has changed, and one for each new trouble.

        Raises Unavailable only when nothing was seen yet; later failures are shown.
        """
        before = self._troubles
        try:
            self._job = self._ask()
            self._trouble = ""
        except Unavailable as error:
            if not self._job:
                raise Unavailable(
                    f"{self._name}: is no folder here, and no cluster can be asked for a job of "
                    f"this name: {error}{did_you_mean_folder(Path(self._name))}"
                ) from error
            self._trouble = str(error)
        return (*self._step_line(), *(line for line in self._troubles if line not in before))

    @property
    def _troubles(self) -> Sequence[str]:
        """The failure to reach the cluster, and the conditions that ask for attention."""
        complaints = _complaints(self._status.get("conditions") or (), self.has_ended())
        return [*([self._trouble] if self._trouble else []), *complaints]

    def _step_line(self) -> Sequence[str]:
        """Empty when the step has not changed."""
        step = int(self._training.get("step", -1))
        if step == self._step:
            return ()
        self._step = step
        shown = []
        for label, field, digits in TRAINING:
            value = _float(self._training.get(field))
            self._trends[field].append(value)
            shown.append(f"{label} {number(value, digits)}")
        return ("  ".join([f"{self._phase}  step {step}/{self._num_steps}", *shown]),)

    def _ask(self) -> dict[str, Any]:
        try:
            answer = subprocess.run(
                self._get, capture_output=True, text=True, timeout=KUBECTL_S, check=False
            )
        except FileNotFoundError as error:
            raise SettingsError(
                f"{self._name}: is no folder here, and kubectl, which would ask a cluster, is not "
                f"installed{did_you_mean_folder(Path(self._name))}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"kubectl has not answered within {KUBECTL_S:g} s") from error
        if answer.returncode != 0:
            reason = (answer.stderr.strip().splitlines()[-1:] or ["no reason given"])[0]
            if "NotFound" not in reason:
                raise Unavailable(f"kubectl: {reason}")
            raise SettingsError(
                f"{self._name}: is no folder here and no job in the cluster: {reason}; see "
                f"--namespace{did_you_mean_folder(Path(self._name))}"
            )
        job: dict[str, Any] = json.loads(answer.stdout)
        return job

    @property
    def _status(self) -> Mapping[str, Any]:
        return self._job.get("status") or {}

    @property
    def _training(self) -> Mapping[str, Any]:
        return self._status.get("training") or {}

    @property
    def _phase(self) -> str:
        return str(self._status.get("phase", "no status yet: does the operator run?"))

    @property
    def _num_steps(self) -> str:
        return str(self._job.get("spec", {}).get("algorithm", {}).get("steps", "?"))

    @property
    def _progress(self) -> str:
        return f"  step {self._training.get('step', '-')}/{self._num_steps}"

    def headline(self) -> str:
        return f"{self._name}  {self._phase}{self._progress}"

    def has_ended(self) -> bool:
        return self._phase in ENDED

    def render(self, width: int) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        troubles = (
            Text(line, style="red" if line == self._trouble else "yellow")
            for line in self._troubles
        )
        head = Text.assemble((self._phase, "bold"), self._progress)
        namespace = self._job.get("metadata", {}).get("namespace", "?")
        return framed(
            Group(head, labelled(self._rows(max(LEAST_SPARKS, width - TEXT_COLUMNS))), *troubles),
            name=self._name,
            place=f"namespace {namespace}",
            state=_age(self._status.get("startTime")),
            width=width,
        )

    def _rows(self, sparks: int) -> "Iterator[tuple[str, RenderableType, str]]":
        for label, field, digits in TRAINING:
            trend = sparkline(self._trends[field], sparks, low=None if field == "reward" else 0.0)
            yield label, number(_float(self._training.get(field)), digits), trend
        for role in ROLES:
            if isinstance(state := self._status.get(role), dict):
                yield role, _role(state), ""


def _role(state: Mapping[str, Any]) -> "Text":
    from rich.text import Text

    ready, desired, restarts = (
        int(state.get(key) or 0) for key in ("ready", "desired", "restarts")
    )
    failure = (state.get("lastFailure") or {}).get("reason")
    parts = [f"{ready}/{desired} ready"]
    parts += [counted(restarts, "restart")] if restarts else []
    parts += [f"last: {failure}"] if failure else []
    return Text(", ".join(parts), style="" if ready >= desired else "yellow")


def _complaints(conditions: Sequence[Mapping[str, Any]], has_ended: bool) -> list[str]:
    """The conditions that ask for attention: bad ones that are true, and good ones that are false
    while the job has not ended.
    """
    lines = []
    for condition in conditions:
        kind, value = str(condition.get("type")), condition.get("status")
        is_bad = kind in _BAD
        is_expected = not is_bad and kind not in _MOMENTS and not has_ended
        if (is_bad and value == "True") or (is_expected and value == "False"):
            parts = (str(condition.get(name) or "") for name in ("reason", "message"))
            lines.append(f"{kind}={value} {': '.join(filter(None, parts))}")
    return lines


def _age(start: Any) -> str:
    if not isinstance(start, str):
        return "not started"
    began = datetime.fromisoformat(start).timestamp()
    return f"started {duration(max(0.0, time.time() - began))} ago"


def _float(value: Any) -> float:
    """A status may hold numbers as text, since its integers have no fractions."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
