"""The checksum notices what a transport or a layout can do to bytes."""

import pytest
import torch

from pipelinerl_weights import checksum
from pipelinerl_weights.checksum import checksum_text, chunk_checksum, fold_checksums, from_int64


@pytest.fixture
def bucket() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3 * 4096 * 8 + 48,), dtype=torch.uint8, generator=generator)


def test_hand_computed_value() -> None:
    words = torch.tensor([5, 7], dtype=torch.int64)
    # One incomplete row: the factors are COLUMN[0] = 0 | 1 and COLUMN[1] = step | 1; ROW[0] = 1.
    expected = (5 + 7 * (0x9E3779B97F4A7C15 | 1)) % (1 << 64)
    assert from_int64(int(chunk_checksum(words.view(torch.uint8)).item())) == f"{expected:016x}"


@pytest.mark.parametrize("byte", [0, 1, 7, 4096 * 8, 2 * 4096 * 8 + 5, 3 * 4096 * 8 + 47])
def test_one_changed_byte_shows(bucket: torch.Tensor, byte: int) -> None:
    changed = bucket.clone()
    changed[byte] ^= 1
    assert chunk_checksum(changed) != chunk_checksum(bucket)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 8), (0, 4096 * 8), (16, 3 * 4096 * 8 + 40), (4096 * 8, 2 * 4096 * 8)]
)
def test_swapped_words_show(bucket: torch.Tensor, first: int, second: int) -> None:
    swapped = bucket.clone()
    swapped[first : first + 8], swapped[second : second + 8] = (
        bucket[second : second + 8],
        bucket[first : first + 8],
    )
    assert chunk_checksum(swapped) != chunk_checksum(bucket)


def test_the_pass_size_does_not_matter(
    bucket: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = chunk_checksum(bucket)
    monkeypatch.setattr(checksum, "_HOST_ROWS", 1)
    assert chunk_checksum(bucket) == expected


def test_the_order_and_the_number_of_chunks_matter() -> None:
    one, two = (checksum_text(torch.tensor(value)) for value in (1, -2))
    assert fold_checksums([one, two]) != fold_checksums([two, one])
    assert fold_checksums([one]) != fold_checksums([one, checksum_text(torch.tensor(0))])


@pytest.mark.parametrize("value", [0, 1, -1, -(1 << 63), (1 << 63) - 1])
def test_a_checksum_is_sixteen_digits(value: int) -> None:
    text = checksum_text(torch.tensor(value))
    assert len(text) == 16
    assert int(text, 16) == value % (1 << 64)
