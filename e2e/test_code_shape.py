"""The source stays readable: few files of one noun each, short functions, one name per thing."""

import pytest

from code_shape import Shape, shipped_sources

MAX_FILES_PER_1000_CODE_LINES = 9
MAX_BREACHES_PER_1000_LINES = 0.7
MAX_SHARE_OF_COMMAND_LINE = 0.16
MAX_CODE_LINES = 34_000
"""A budget, at the reference width. The source had 35,200 lines before its rooms were merged, and
30,600 after; data-plane features have the rest.
"""


@pytest.fixture(scope="module")
def shape() -> Shape:
    return Shape(shipped_sources())


def test_no_function_is_longer_than_a_screen(shape: Shape) -> None:
    assert shape.long_functions == []


def test_no_file_is_longer_than_a_reader_follows(shape: Shape) -> None:
    assert shape.long_files == []


def test_a_public_class_name_stands_for_one_thing(shape: Shape) -> None:
    assert shape.repeated_class_names == {}


def test_files_are_nouns_and_not_slices(shape: Shape) -> None:
    assert shape.files_per_1000_code_lines <= MAX_FILES_PER_1000_CODE_LINES
    assert shape.small_modules_with_one_importer == []


def test_limits_of_complexity_are_seldom_exceeded(shape: Shape) -> None:
    per_1000 = 1000 * len(shape.limit_breaches) / shape.num_lines
    assert per_1000 <= MAX_BREACHES_PER_1000_LINES, shape.limit_breaches


def test_the_product_is_small_and_most_of_it_is_the_run(shape: Shape) -> None:
    assert shape.num_code_lines_at_reference_width <= MAX_CODE_LINES
    assert shape.share_of("pipelinerl_cli") <= MAX_SHARE_OF_COMMAND_LINE
