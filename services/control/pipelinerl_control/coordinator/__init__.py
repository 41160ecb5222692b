"""The weight-transfer coordinator: membership of the group, epochs, and the fan-out of in-flight
updates.

async with serve_coordinator(settings, generators, trainer_address=..., listen="127.0.0.1:0",
token=None) as running:
    await running.coordinator.run()
"""

from pipelinerl_control.coordinator.coordinator import Coordinator, Counters
from pipelinerl_control.coordinator.membership import Group, Member
from pipelinerl_control.coordinator.server import RunningCoordinator, serve_coordinator

__all__ = ["Coordinator", "Counters", "Group", "Member", "RunningCoordinator", "serve_coordinator"]
