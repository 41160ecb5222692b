"""Problems from files, in an endless order in which every epoch holds every problem once."""

from pipelinerl_actor.dataset.problems import Problems
from pipelinerl_actor.dataset.settings import DataSettings, DifficultySettings

__all__ = ["DataSettings", "DifficultySettings", "Problems"]
