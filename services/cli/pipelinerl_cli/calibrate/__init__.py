"""`pipelinerl calibrate`: measures U(h) of a generator for `pipelinerl plan --utilization`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl_cli.terminal import at_least, positive
from pipelinerl_common.errors import SettingsError

if TYPE_CHECKING:
    from pipelinerl_cli.calibrate.measurement import CurveScale, RequestShape
    from pipelinerl_common.settings import Job

MAX_TOKENS, PROMPT_TOKENS, MAX_RUNNING = 256, 32, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, kind: type, metavar: str, help_text: str, **options: Any) -> None:
        parser.add_argument(flag, type=kind, metavar=metavar, help=help_text, **options)

    url = "base URL, for example http://127.0.0.1:8000"
    add("--generator", str, "URL", url, required=True)
    add("--token-file", Path, "FILE", "file with the generator's bearer token")
    add(
        "--job",
        Path,
        "FILE",
        "take max tokens, temperature, GPUs and largest concurrency from a job",
    )
    add("--max-tokens", int, "N", f"tokens of each completion (default {MAX_TOKENS})")
    add("--prompt-tokens", int, "N", f"tokens of each prompt (default {PROMPT_TOKENS})")
    add("--max-running", int, "H", f"most requests at once (default {MAX_RUNNING})")
    add("--gpus", int, "N", "GPUs of the generator (default 1)")
    add("--seconds", float, "S", "measured at each concurrency (default 10)", default=10.0)
    add("--timeout", float, "S", "longest time for one request (default 600)", default=600.0)
    peak = "U relative to a GPU's peak FLOP/s; needs --parameters"
    add("--peak-flops", float, "F", peak)
    add("--parameters", float, "P", "of the model; a token costs 2 P FLOPs")
    output = Path("utilization.json")
    add("--output", Path, "FILE", f"default {output}", default=output)


def run(args: argparse.Namespace) -> int:
    """Measures and writes the file. Raises SettingsError, Unavailable, PermanentError."""
    import asyncio

    from pipelinerl_cli.calibrate.measurement import (
        GeneratorEndpoint,
        curve_document,
        levels,
        measure_all,
        write_curve,
    )
    from pipelinerl_cli.terminal import print_table
    from pipelinerl_common.settings import load_job

    job = None if args.job is None else load_job(args.job)
    shape, scale = _shape(args, job), _scale(args, job)
    default_most = MAX_RUNNING if job is None else job.spec.actors.generator.max_running_requests
    most = default_most if args.max_running is None else args.max_running
    concurrencies = levels(at_least(1, "--max-running", most))
    endpoint = GeneratorEndpoint(
        args.generator, _token(args.token_file), shape, positive("--timeout", args.timeout)
    )
    seconds = positive("--seconds", args.seconds)
    measured = asyncio.run(measure_all(endpoint, concurrencies, seconds))
    about = {
        "generator": args.generator,
        "prompt_tokens": shape.prompt_tokens,
        "max_tokens": shape.max_tokens,
    }
    document = curve_document(measured, scale, about)
    write_curve(args.output, document)
    rows = [
        [f"{point['h']:g}", f"{point['tokens_per_second']:.1f}", f"{point['utilization']:.3f}"]
        for point in document["points"]
    ]
    print_table(["h", "tokens/s per GPU", "U"], rows)
    print(f"{args.output}: read it with `pipelinerl plan --utilization {args.output}`")
    return 0


def _shape(args: argparse.Namespace, job: "Job | None") -> "RequestShape":
    from pipelinerl_cli.calibrate.measurement import RequestShape

    prompt_tokens, max_tokens, temperature = PROMPT_TOKENS, MAX_TOKENS, 1.0
    if job is not None:
        sampling = job.spec.task.sampling
        max_tokens, temperature = sampling.max_tokens, sampling.temperature
        prompt_tokens = min(prompt_tokens, job.spec.model.max_model_len - max_tokens)
    if args.prompt_tokens is not None:
        prompt_tokens = args.prompt_tokens
    if args.max_tokens is not None:
        max_tokens = args.max_tokens
    return RequestShape(
        at_least(1, "--prompt-tokens", prompt_tokens),
        at_least(1, "--max-tokens", max_tokens),
        temperature,
    )


def _scale(args: argparse.Namespace, job: "Job | None") -> "CurveScale":
    from pipelinerl_cli.calibrate.measurement import CurveScale

    default_gpus = 1 if job is None else job.spec.actors.generator.tensor_parallel_size
    num_gpus = at_least(1, "--gpus", default_gpus if args.gpus is None else args.gpus)
    flags = {"--peak-flops": args.peak_flops, "--parameters": args.parameters}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) == 1:
        (missing,) = flags.keys() - set(given)
        raise SettingsError(
            f"{given[0]} needs {missing} too: U is tokens/s times 2 x parameters over the peak"
        )
    if not given:
        return CurveScale(num_gpus)
    peak, parameters = (positive(flag, value) for flag, value in flags.items())
    return CurveScale(num_gpus, peak / (2 * parameters))


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
