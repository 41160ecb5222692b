"""Where a task's problems come from, as it stands in `task.args.data`."""

from typing import Annotated

from pydantic import Field, model_validator

from pipelinerl_common.settings.base import Settings


class DifficultySettings(Settings):
    field: Annotated[str, Field(min_length=1)]
    """Field of a row that holds its difficulty, a number; the higher, the harder."""
    min: float | None = None
    """Rows that are easier are left out."""
    max: float | None = None
    """Rows that are harder are left out."""
    curriculum_epochs: Annotated[int, Field(ge=0)] = 0
    """So many first epochs go from easy to hard, with rows of equal difficulty shuffled; later ones
    are shuffled as a whole.
    """

    @model_validator(mode="after")
    def _some_row_can_pass(self) -> "DifficultySettings":
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"difficulty.min={self.min} is above difficulty.max={self.max}: no row can pass"
            )
        return self


class DataSettings(Settings):
    path: Annotated[str, Field(min_length=1)]
    """A JSONL file, a Parquet file, or a folder: one that Hugging Face's `save_to_disk` wrote, or
    one of JSONL or Parquet files whose names begin with the split's.
    """
    split: Annotated[str, Field(min_length=1)] = "train"
    """Which split of a folder."""
    difficulty: DifficultySettings | None = None
    """Filter and curriculum by a number in every row."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: object) -> object:
        """`data: problems.jsonl` is short for `data: {path: problems.jsonl}`."""
        return {"path": given} if isinstance(given, str) else given
