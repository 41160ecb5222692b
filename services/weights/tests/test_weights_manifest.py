"""The manifest's layout and its forms on the wire."""

import json
import subprocess
import sys

import pytest

from pipelinerl_common.errors import MalformedMessage
from pipelinerl_weights.manifest import Manifest, TensorSpec

TENSORS = (
    TensorSpec("a", "float32", (3, 5)),  # 60 bytes
    TensorSpec("b", "bfloat16", (7,)),  # 14
    TensorSpec("c", "int8", (3,)),  # 3
    TensorSpec("d", "float32", ()),  # 4
    TensorSpec("e", "float32", (0, 4)),  # 0
)


def test_its_bytes_are_those_of_the_tensors() -> None:
    assert Manifest(TENSORS, bucket_bytes=96).num_bytes == 60 + 14 + 3 + 4


def test_every_form_reads_back_equal() -> None:
    manifest = Manifest(TENSORS, bucket_bytes=96)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert Manifest.from_proto(manifest.to_proto()) == manifest


def test_the_hash_names_the_tensors_their_order_and_the_bucket_size() -> None:
    manifest = Manifest(TENSORS, bucket_bytes=96)
    assert Manifest.from_proto(manifest.to_proto()).hash == manifest.hash
    others = [Manifest(TENSORS[::-1], 96), Manifest(TENSORS[1:], 96), Manifest(TENSORS, 64)]
    assert len({manifest.hash, *(other.hash for other in others)}) == 4


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{}", "tensors"),
        ('"nonsense"', "not a weight manifest"),
        ('{"tensors": [], "bucket_bytes": 8}', "no tensors"),
        (
            '{"tensors": [{"name": "a", "dtype": "float32", "shape": [1]}], "bucket_bytes": 0}',
            "bucket_bytes=0",
        ),
        (
            '{"tensors": [{"name": "a", "dtype": "float33", "shape": [1]}], "bucket_bytes": 8}',
            "float33",
        ),
        (
            '{"tensors": [{"name": "a", "dtype": "float32", "shape": [-1]}], "bucket_bytes": 8}',
            "negative",
        ),
        (
            '{"tensors": [{"name": "", "dtype": "float32", "shape": [1]}], "bucket_bytes": 8}',
            "empty name",
        ),
        (
            '{"tensors": ['
            + ", ".join(['{"name": "a", "dtype": "int8", "shape": [1]}'] * 2)
            + '], "bucket_bytes": 8}',
            "twice",
        ),
    ],
)
def test_a_broken_manifest_is_refused_by_name(document: str, complaint: str) -> None:
    with pytest.raises(MalformedMessage, match=complaint):
        Manifest.from_json(json.loads(document))


def test_the_manifest_loads_without_torch() -> None:
    code = (
        "import sys, pipelinerl_weights.manifest, pipelinerl_weights.errors; sys.exit('torch' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
