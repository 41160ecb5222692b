"""The real `pipelinerl up` with fake services, as processes: `python cli_harness.py up ...`.

This program is every service of the run as well, without a model: the trainer steps as soon as the
coordinator has formed a group. By its metrics the trainer takes everything that is generated, and
waits for more most of the time.

A file `<output>/do/<name>` is an order to the process of that name, which carries it out once and
removes it: "crash", "settings", "stop".
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from pipelinerl.v1 import metrics_pb2, policy_pb2, policy_pb2_grpc
from pipelinerl_common import rpc
from pipelinerl_common.metrics import PREPROCESSOR, TRAINER, Metrics, serve_metrics
from pipelinerl_common.settings import Job, load_job
from pipelinerl_common.stream import Login, connect

TICK_S = 0.05


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--job", "--output", "--token-file"):
        parser.add_argument(flag, type=Path)
    for flag in ("--name", "--listen", "--nats-url", "--metrics-listen"):
        parser.add_argument(flag, default="")
    return parser.parse_known_args()[0]


class FakeService:
    """One service of the run; the subcommand's flags say which."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.output: Path = flags.output
        self.job: Job = load_job(flags.job)
        self.token = flags.token_file.read_text() if flags.token_file else None
        self.stop = asyncio.Event()

    async def tick(self) -> bool:
        """Whether to continue; carries out an order."""
        order = self.output / "do" / self.flags.name
        if order.exists():
            what = order.read_text()
            order.unlink()
            print(f"ordered to {what}", flush=True)
            if what != "stop":
                sys.exit({"crash": 1, "settings": 2}[what])
            return False
        await asyncio.sleep(TICK_S)
        return not self.stop.is_set()

    async def serve(self) -> None:
        while await self.tick():
            pass

    async def preprocess(self) -> None:
        metrics = Metrics(PREPROCESSOR, self.job.name)
        async with serve_metrics(self.flags.metrics_listen, metrics.exposition):
            while await self.tick():
                metrics.counter("groups_trained_total").inc()

    async def generate(self) -> None:
        program = "import time; time.sleep(600)"
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, f"worker of {self.output}"
        )
        try:
            await self.answer()
        finally:
            worker.kill()

    async def answer(self) -> None:
        state: dict[str, Any] = {
            "epoch": 0,
            "version": -1,
            "checksum": None,
            "num_workers": 1,
            "num_running": 0,
            "updates_total": 0,
            "update_failures_total": 0,
            "draining": False,
        }

        async def weights(request: web.Request) -> web.Response:
            return web.json_response(state)

        async def join(request: web.Request) -> web.Response:
            state["epoch"] = (await request.json())["epoch"]
            return web.json_response({"epoch": state["epoch"], "ranks": [1]})

        app = web.Application()
        app.router.add_get("/health", weights)
        app.router.add_get("/weights", weights)
        app.router.add_post("/init_process_group", join)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        host, _, port = self.flags.listen.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        await self.serve()
        await runner.cleanup()

    async def train(self) -> None:
        policy = FakePolicy()
        service = rpc.RpcService(
            policy_pb2_grpc.add_PolicyServicer_to_server, policy, "pipelinerl.v1.Policy"
        )
        stream_settings = self.job.spec.stream
        step = self.newest_checkpoint()
        metrics = Metrics(TRAINER, self.job.name)
        async with (
            serve_metrics(self.flags.metrics_listen, metrics.exposition),
            rpc.serve(self.flags.listen, [service], token=self.token),
            connect(
                self.flags.nats_url,
                self.job.name,
                stream_settings,
                name="trainer-0",
                login=Login(token=self.token),
            ) as stream,
        ):
            while step < self.job.spec.algorithm.steps and await self.tick():
                if policy.epoch == 0:
                    continue
                step += 1
                metrics.gauge("policy_version").set(step)
                metrics.counter("trainer_phase_seconds_total").inc(0.9 * TICK_S, phase="wait")
                values = {
                    "reward_mean": step / 100,
                    "lag_mean": 1.0,
                    "lag_max": 2.0,
                    "ess": 0.9,
                    "num_trained_tokens": 10.0,
                }
                await stream.publish_metrics(
                    metrics_pb2.MetricsRecord(
                        schema_version=1,
                        job=self.job.name,
                        role="trainer",
                        instance="trainer-0",
                        time=time.time(),
                        step=step,
                        values={
                            **values,
                            "num_sequences": 4.0,
                            "weight_updates_total": float(step),
                        },
                    )
                )
            self.save(step)

    async def evaluate(self) -> None:
        """Waits for the last step, then for the file `<output>/evaluate`, and leaves a result."""
        last = self.job.spec.algorithm.steps
        async with connect(
            self.flags.nats_url,
            self.job.name,
            self.job.spec.stream,
            name="evaluator-0",
            login=Login(token=self.token),
        ) as stream:

            async def report(step: int, done: float) -> None:
                values = {
                    "evaluation_running_step": float(last),
                    "evaluation_prompts_done{set=held-out}": done,
                }
                result = {
                    "{set=held-out,k=1}": 0.75,
                    "_low{set=held-out,k=1}": 0.5,
                    "_high{set=held-out,k=1}": 1.0,
                }
                values |= {f"evaluation_pass_ratio{key}": value for key, value in result.items()}
                await stream.publish_metrics(
                    metrics_pb2.MetricsRecord(
                        schema_version=1,
                        job=self.job.name,
                        role="evaluator",
                        instance="evaluator-0",
                        time=time.time(),
                        step=step,
                        values={
                            **values,
                            "evaluation_prompts_planned{set=held-out}": 4.0,
                            "evaluation_sets_failed": 0.0,
                        },
                    )
                )

            while await self.tick():
                if self.newest_checkpoint() >= last:
                    await report(-1, 1.0)
                    if (self.output / "evaluate").exists():
                        await report(last, 4.0)
                        (self.output / "evaluations").mkdir(exist_ok=True)
                        (self.output / "evaluations" / f"step-{last}.json").write_text("{}")
                        return

    def newest_checkpoint(self) -> int:
        manifests = (self.output / "checkpoints").glob("step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)

    def save(self, step: int) -> None:
        folder = self.output / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))


class FakePolicy(policy_pb2_grpc.PolicyServicer):
    """The trainer's side of the weight-transfer group."""

    def __init__(self) -> None:
        self.epoch = 0

    async def AwaitGroup(
        self, request: policy_pb2.AwaitGroupRequest, context: object
    ) -> policy_pb2.AwaitGroupResponse:
        raise NotImplementedError

    async def JoinGroup(
        self, request: policy_pb2.JoinGroupRequest, context: Any
    ) -> policy_pb2.JoinGroupResponse:
        self.epoch = request.epoch
        return policy_pb2.JoinGroupResponse(master_address="127.0.0.1", master_port=1)

    async def GetPolicy(
        self, request: policy_pb2.GetPolicyRequest, context: Any
    ) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(epoch=self.epoch)


async def serve(flags: argparse.Namespace) -> None:
    service = FakeService(flags)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, service.stop.set)
    role = flags.name.partition("-")[0]
    if role == "trainer":
        await service.train()
    elif role == "generator":
        await service.generate()
    elif role == "preprocessor":
        await service.preprocess()
    elif role == "evaluator":
        await service.evaluate()
    elif role:
        await service.serve()
    else:  # the model's preparation
        flags.name = "prepare"
        await service.tick()
        (service.output / "model").mkdir(exist_ok=True)


def up() -> int:
    """The command, with this program as every service and as the model's preparation."""
    from pipelinerl_cli.__main__ import main
    from pipelinerl_cli.up import local_run
    from pipelinerl_control import plan

    modules = cast(dict[plan.Role, str], plan.MODULES)
    modules.update(dict.fromkeys(plan.Role, "cli_harness"))
    local_run.PREPARE_MODULE = "cli_harness"
    plan.EVALUATION_MARGIN_S = 3.0
    return main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["up"]:
        sys.exit(up())
    asyncio.run(serve(parse()))
