"""`pipelinerl calibrate`: measures U(h) of a generator for `pipelinerl plan --utilization`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl_common.errors import SettingsError
from pipelinerl_common.text import counted

if TYPE_CHECKING:
    from pipelinerl_cli.calibrate.curve_file import CurveScale
    from pipelinerl_cli.calibrate.endpoint import RequestShape
    from pipelinerl_cli.calibrate.measurement import Level
    from pipelinerl_common.settings import Job

_MAX_TOKENS, _PROMPT_TOKENS, _MAX_RUNNING = 256, 32, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--generator",
        required=True,
        metavar="URL",
        help="base URL, for example http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the generator's bearer token"
    )
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help="take max tokens, temperature, GPUs and largest concurrency from a job",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"tokens of each completion (default {_MAX_TOKENS})",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"tokens of each prompt (default {_PROMPT_TOKENS})",
    )
    parser.add_argument(
        "--max-running",
        type=int,
        metavar="H",
        help=f"most requests at once (default {_MAX_RUNNING})",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the generator (default 1)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="measured at each concurrency (default 10)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest time for one request (default 600)",
    )
    parser.add_argument(
        "--peak-flops",
        type=float,
        metavar="F",
        help="U relative to a GPU's peak FLOP/s; needs --parameters",
    )
    parser.add_argument(
        "--parameters", type=float, metavar="P", help="of the model; a token costs 2 P FLOPs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("utilization.json"),
        metavar="FILE",
        help="default utilization.json",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and writes the file. Raises SettingsError, Unavailable, PermanentError."""
    import asyncio

    from pipelinerl_cli.calibrate.curve_file import curve_document, write_curve
    from pipelinerl_cli.calibrate.measurement import levels
    from pipelinerl_common.settings import load_job

    job = None if args.job is None else load_job(args.job)
    shape, scale = _shape(args, job), _scale(args, job)
    default_most = _MAX_RUNNING if job is None else job.spec.actors.generator.max_running_requests
    most = _at_least_one(
        "--max-running", default_most if args.max_running is None else args.max_running
    )
    for flag, value in (("--seconds", args.seconds), ("--timeout", args.timeout)):
        _positive(flag, value)
    token = _token(args.token_file)
    measured = asyncio.run(_measure_all(args, shape, levels(most), token))
    about = {
        "generator": args.generator,
        "prompt_tokens": shape.prompt_tokens,
        "max_tokens": shape.max_tokens,
    }
    document = curve_document(measured, scale, about)
    write_curve(args.output, document)
    for point in document["points"]:
        print(
            f"h={point['h']:<6g} {point['tokens_per_second']:10.1f} tokens/s per GPU   "
            f"U={point['utilization']:.3f}"
        )
    print(f"{args.output}: read it with `pipelinerl plan --utilization {args.output}`")
    return 0


async def _measure_all(
    args: argparse.Namespace, shape: "RequestShape", concurrencies: list[int], token: str | None
) -> list["Level"]:
    import aiohttp

    from pipelinerl_cli.calibrate.endpoint import Endpoint
    from pipelinerl_cli.calibrate.measurement import measure
    from pipelinerl_common.generator_client import GeneratorClient

    measured = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = GeneratorClient(args.generator, token, session)
        endpoint = Endpoint(client, shape, args.timeout)
        for concurrency in concurrencies:
            level = await measure(endpoint.complete, concurrency, args.seconds)
            print(
                f"{concurrency} at once: {level.tokens_per_second:.1f} tokens/s "
                f"({counted(level.num_requests, 'request')})",
                flush=True,
            )
            measured.append(level)
    return measured


def _shape(args: argparse.Namespace, job: "Job | None") -> "RequestShape":
    from pipelinerl_cli.calibrate.endpoint import RequestShape

    prompt_tokens, max_tokens, temperature = _PROMPT_TOKENS, _MAX_TOKENS, 1.0
    if job is not None:
        max_tokens, temperature = (
            job.spec.task.sampling.max_tokens,
            job.spec.task.sampling.temperature,
        )
        prompt_tokens = min(prompt_tokens, job.spec.model.max_model_len - max_tokens)
    return RequestShape(
        _at_least_one(
            "--prompt-tokens", prompt_tokens if args.prompt_tokens is None else args.prompt_tokens
        ),
        _at_least_one("--max-tokens", max_tokens if args.max_tokens is None else args.max_tokens),
        temperature,
    )


def _scale(args: argparse.Namespace, job: "Job | None") -> "CurveScale":
    from pipelinerl_cli.calibrate.curve_file import CurveScale

    default_gpus = 1 if job is None else job.spec.actors.generator.tensor_parallel_size
    num_gpus = _at_least_one("--gpus", default_gpus if args.gpus is None else args.gpus)
    if (args.peak_flops is None) != (args.parameters is None):
        given, missing = (
            ("--peak-flops", "--parameters")
            if args.parameters is None
            else ("--parameters", "--peak-flops")
        )
        raise SettingsError(
            f"{given} needs {missing} too: U is tokens/s times 2 x parameters over the peak"
        )
    if args.peak_flops is None:
        return CurveScale(num_gpus)
    return CurveScale(
        num_gpus,
        _positive("--peak-flops", args.peak_flops)
        / (2 * _positive("--parameters", args.parameters)),
    )


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--token-file {path}: cannot be read: {error}") from error
    if not token:
        raise SettingsError(f"--token-file {path}: is empty; put the generator's token in it")
    return token


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise SettingsError(f"{flag} {value} must be at least 1")
    return value


def _positive(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise SettingsError(f"{flag} {value:g} must be a number above 0")
    return value
