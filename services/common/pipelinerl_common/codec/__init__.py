"""Protobuf and numpy columns: bytes on the wire become arrays without a loop over tokens, and every
length is checked.

Decoding returns an object that keeps all invariants of its type's docstring, or raises
MalformedMessage. Whether numbers are finite is for the reader to judge, since one odd reward is no
reason to lose a group.
"""

from pipelinerl_common.codec.batch import (
    micro_batch_from_proto,
    micro_batch_to_proto,
    plan_from_proto,
    plan_to_proto,
)
from pipelinerl_common.codec.group import (
    SCHEMA_VERSION,
    EncodedPart,
    GroupJoiner,
    GroupPart,
    PartKey,
    decode_part,
    encode_group,
)

__all__ = [
    "SCHEMA_VERSION",
    "EncodedPart",
    "GroupJoiner",
    "GroupPart",
    "PartKey",
    "decode_part",
    "encode_group",
    "micro_batch_from_proto",
    "micro_batch_to_proto",
    "plan_from_proto",
    "plan_to_proto",
]
