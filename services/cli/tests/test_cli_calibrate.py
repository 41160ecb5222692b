"""`pipelinerl calibrate` over real HTTP against a generator that decodes with a known speed."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.calibrate import add_arguments, run
from pipelinerl_cli.calibrate.measurement import (
    CurveScale,
    Level,
    RequestSpan,
    curve_document,
    levels,
    measure,
    tokens_within,
)
from pipelinerl_common.errors import PermanentError, SettingsError, Unavailable
from pipelinerl_planner.utilization import read_utilization

REQUEST_S = 0.01
JOB = {
    "apiVersion": "pipelinerl.dev/v1alpha1",
    "kind": "PipelineRLJob",
    "metadata": {"name": "calibrated"},
    "spec": {
        "model": {"uri": "hf://some/model", "maxModelLen": 20},
        "task": {"path": "a.b:C", "sampling": {"maxTokens": 12, "temperature": 0.7}},
        "actors": {"generator": {"maxRunningRequests": 3, "tensorParallelSize": 2}},
    },
}


def completion(token_ids: list[int]) -> dict[str, Any]:
    """A generator's answer with one choice of these tokens."""
    choice = {
        "index": 0,
        "message": {"content": ""},
        "finish_reason": "length",
        "token_ids": token_ids,
        "token_logprobs": [-0.5] * len(token_ids),
        "weight_versions": [[0, len(token_ids)]],
    }
    usage = {"prompt_tokens": 1, "completion_tokens": len(token_ids), "total_tokens": 1}
    return {"model": "m", "choices": [choice], "prompt_token_ids": [1], "usage": usage}


class Generator:
    """Decodes every request in the same time, at most `places` at once; or gives a fixed answer."""

    def __init__(self, places: int = 1000, answer: tuple[int, str] | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.most_running = 0
        self._running = 0
        self._places = asyncio.Semaphore(places)
        self._answer = answer

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.tokens.add(request.headers.get("Authorization", ""))
        if self._answer is not None:
            return web.Response(
                status=self._answer[0], text=self._answer[1], content_type="application/json"
            )
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        async with self._places:
            await asyncio.sleep(REQUEST_S)
        self._running -= 1
        return web.json_response(completion([7] * body["max_tokens"]))


@contextmanager
def serving(generator: Generator) -> Iterator[str]:
    """The generator's URL; it runs in its own thread, as the command has its own event loop."""
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", generator.complete)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def calibrated(tmp_path: Path, url: str, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "u.json"
    assert command("--generator", url, "--seconds", "0.3", "--output", str(output), *arguments) == 0
    document: dict[str, Any] = json.loads(output.read_text())
    return document


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]), (9, [1, 2, 4, 8, 9])],
)
def test_levels(most: int, expected: list[int]) -> None:
    assert levels(most) == expected


def test_tokens_are_those_of_the_time_measured() -> None:
    spans = [
        RequestSpan(0, 5, 10),
        RequestSpan(3.5, 5.5, 8),
        RequestSpan(6, 16, 20),
        RequestSpan(8, 9, 100),
    ]
    assert tokens_within(spans, 3, 7) == pytest.approx(4 + 8 + 2)


def test_curve_per_gpu_and_relative_to_the_plateau() -> None:
    measured = [Level(1, 100.0, 5), Level(4, 300.0, 9), Level(8, 280.0, 9)]
    document = curve_document(measured, CurveScale(num_gpus=2), {})
    assert document["relative_to"] == "plateau"
    assert document["peak_tokens_per_second"] == 150
    assert [(point["h"], point["tokens_per_second"]) for point in document["points"]] == [
        (0.5, 50),
        (2, 150),
        (4, 140),
    ]
    assert [point["utilization"] for point in document["points"]] == pytest.approx(
        [1 / 3, 1, 140 / 150]
    )


def test_curve_relative_to_a_given_peak() -> None:
    document = curve_document([Level(1, 100.0, 5)], CurveScale(1, 400.0), {})
    assert (document["relative_to"], document["points"][0]["utilization"]) == ("peak_flops", 0.25)
    with pytest.raises(
        SettingsError, match=r"allow 50\.0 tokens/s per GPU, but 100\.0 were measured"
    ):
        curve_document([Level(1, 100.0, 5)], CurveScale(1, 50.0), {})


def test_speed_grows_until_the_generators_places_are_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = Generator(places=2)
    with serving(generator) as url:
        document = calibrated(
            tmp_path, url, "--max-running", "8", "--max-tokens", "20", "--prompt-tokens", "5"
        )
    assert [point["h"] for point in document["points"]] == [1, 2, 4, 8]
    speeds = [point["tokens_per_second"] for point in document["points"]]
    assert 0 < speeds[0] <= 20 / REQUEST_S
    assert speeds[1] > 1.4 * speeds[0]
    assert max(speeds) <= 1.05 * 2 * 20 / REQUEST_S
    assert max(point["utilization"] for point in document["points"]) == 1
    assert (generator.most_running, generator.tokens) == (8, {""})
    assert all(len(body.pop("prompt_token_ids")) == 5 for body in generator.bodies)
    assert all(
        body == {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
        for body in generator.bodies
    )
    curve = read_utilization(tmp_path / "u.json")
    assert (curve.batch_sizes, curve.peak_tokens_per_second) == ((1, 2, 4, 8), max(speeds))
    assert "8 at once" in capsys.readouterr().out


def test_job_gives_lengths_temperature_gpus_and_concurrency(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "token").write_text("secret\n")
    generator = Generator()
    with serving(generator) as url:
        document = calibrated(
            tmp_path,
            url,
            "--job",
            str(tmp_path / "job.yaml"),
            "--token-file",
            str(tmp_path / "token"),
        )
    assert [point["h"] for point in document["points"]] == [0.5, 1, 1.5]
    assert generator.most_running == 3
    assert generator.tokens == {"Bearer secret"}
    assert (document["prompt_tokens"], document["max_tokens"]) == (8, 12)
    assert generator.bodies[0]["temperature"] == 0.7


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            (401, '{"error": {"message": "no token"}}'),
            SettingsError,
            "HTTP 401: no token; give the generator's token",
        ),
        (
            (400, '{"error": {"message": "too long"}}'),
            SettingsError,
            "HTTP 400: too long; see --prompt-tokens",
        ),
        (
            (503, '{"error": {"message": "no weights"}}'),
            Unavailable,
            "serves only with --serve-initial",
        ),
        ((500, "broken"), PermanentError, "HTTP 500: broken"),
        ((200, "[]"), PermanentError, "not the expected answer"),
        ((200, json.dumps(completion([]))), PermanentError, "the answer has no tokens"),
    ],
)
def test_refusals_and_bad_answers_are_told(
    answer: tuple[int, str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with serving(Generator(answer=answer)) as url, pytest.raises(error) as caught:
        command("--generator", url, "--max-running", "2", "--output", str(tmp_path / "u.json"))
    assert message in str(caught.value)
    assert not (tmp_path / "u.json").exists()


def test_slow_answers_end_at_the_timeout(tmp_path: Path) -> None:
    with (
        serving(Generator(places=0)) as url,
        pytest.raises(Unavailable, match=r"no answer within 0\.1 s; see --timeout"),
    ):
        command("--generator", url, "--timeout", "0.1", "--output", str(tmp_path / "u.json"))


async def test_one_failing_request_ends_the_level() -> None:
    numbers = iter(range(3))

    async def complete() -> int:
        if next(numbers) == 2:
            raise Unavailable("gone")
        await asyncio.get_running_loop().create_future()  # never answers
        return 1

    with pytest.raises(Unavailable, match="gone"):
        async with asyncio.timeout(10):
            await measure(complete, 3, 60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generator", "nonsense"], "not a URL"),
        (["--max-running", "0"], "--max-running 0 must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        (["--seconds", "0"], "--seconds 0 must be a number above 0"),
        (["--timeout", "inf"], "--timeout inf must be a number above 0"),
        (["--peak-flops", "1e15"], "--peak-flops needs --parameters too"),
        (["--token-file", "missing"], "--token-file missing: cannot be read"),
        (["--job", "missing.yaml"], "missing.yaml: there is no such file"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--generator", "http://127.0.0.1:9", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_generator_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--generator", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.e2e
def test_real_generator(tmp_path: Path) -> None:
    """The arithmetic job's model behind a vLLM engine: 24 tokens after 32, whatever the model
    thinks of it.
    """
    job = Path(__file__).parents[3] / "e2e" / "jobs" / "arithmetic.yaml"
    folder = ["--job", str(job), "--output", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pipelinerl_actor.prepare", *folder],
        check=True,
        timeout=120,
        capture_output=True,
    )
    start = [
        sys.executable,
        "-m",
        "pipelinerl_actor.generator",
        *folder,
        "--listen",
        "127.0.0.1:0",
        "--serve-initial",
    ]
    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as generator:
        deadline = threading.Timer(240, generator.kill)
        deadline.start()
        try:
            document = calibrated(
                tmp_path,
                _address(generator),
                "--job",
                str(job),
                "--max-tokens",
                "24",
                "--max-running",
                "4",
            )
        finally:
            generator.terminate()
            generator.communicate(timeout=60)
            deadline.cancel()
    assert [point["h"] for point in document["points"]] == [1, 2, 4]
    assert all(point["tokens_per_second"] > 0 for point in document["points"])
    assert generator.returncode == 0


def _address(generator: "subprocess.Popen[str]") -> str:
    """From the generator's log; an end of the log without it is a failed start."""
    assert generator.stderr is not None
    for line in generator.stderr:
        if (found := re.search(r"listening=(http://\S+)", line)) is not None:
            return found[1]
    raise AssertionError("the generator ended before it listened")
