"""The receiving end of the raw broadcast, a process: `python -m bench.weights_mirror
PORT SIZES`.

It joins a group of two made like the generator's. For each line on standard input it prints `ready`
and receives one broadcast per bucket into buffers of its own: no handshake, no checksum, no copy.
"""

import argparse
import json
import sys

import torch

from pipelinerl_weights.group import TransferGroup

BACKEND, TIMEOUT_S, EPOCH = "gloo", 300.0, 1
BARRIER = "0" * 16


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="weights_mirror", description="The receiver of `bench weights`' raw broadcasts."
    )
    parser.add_argument("port", type=int)
    parser.add_argument("sizes", help="bytes of each bucket, as a JSON list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in json.loads(args.sizes)]
    with TransferGroup.join(
        "127.0.0.1",
        args.port,
        rank=1,
        world_size=2,
        backend=BACKEND,
        epoch=EPOCH,
        timeout_s=TIMEOUT_S,
    ) as group:
        for _ in sys.stdin:
            print("ready", flush=True)
            for buffer in buffers:
                group.broadcast(buffer)
            group.gather_checksums(BARRIER, TIMEOUT_S, torch.device("cpu"))


if __name__ == "__main__":
    main()
