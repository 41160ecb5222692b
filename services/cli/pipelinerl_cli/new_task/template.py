"""What `pipelinerl new-task` writes: complete and running as it is, for a tiny model on a CPU."""

TASK = '''"""The task {task}: say here what the policy is to learn."""

import random

from pipelinerl_actor.task import Prompt, Task, Turn, Verdict


class {task}(Task):
    """Rewards numbers up to `highest` that are even. Replace prompt and verify by your own."""

    def __init__(self, *, seed: int, highest: int = 18) -> None:
        """What is named here beside `seed` can be set in the job file's task.args."""
        self.seed = seed
        self.highest = highest

    def prompt(self, index: int) -> Prompt:
        """The same index always gives the same prompt. Facts are for verify; the policy does not see them."""
        source = random.Random(f"{module} {{self.seed}} {{index}}")
        left, right = source.randrange(10), source.randrange(10)
        return Prompt.of(f"{{left}}+{{right}}=", sum=left + right)

    async def verify(self, prompt: Prompt, answer: Turn) -> Verdict:
        """The reward of one answer. A plain `def` runs in a process of its own, for checks that compute or may hang."""
        is_number = answer.text.isdecimal()
        success = float(is_number and int(answer.text) % 2 == 0 and int(answer.text) <= self.highest)
        return Verdict(success, {{"success": success, "answered": float(is_number)}})
'''

JOB = """# Runs {module}.py beside this file: pipelinerl up {module}.yaml
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata:
  name: {job}
spec:
  model:
    uri: tiny://arithmetic?digits=1 # a tiny model made on the spot; later a folder or hf://organisation/name
    dtype: float32 # bfloat16 on GPUs
    maxModelLen: 64
  task:
    path: {module}:{task}
    args: {{highest: 18}}
    groupSize: 8
    sampling: {{temperature: 1.0, maxTokens: 4}}
    timeoutSeconds: 60
  algorithm:
    steps: 60
    groupsPerStep: 16
    optimizer: {{learningRate: 2.0e-4, maxGradNorm: 0.3}}
  staleness: {{policy: areal, eta: 2}}
  actors:
    generator: {{engine: vllm, maxRunningRequests: 64, kvCacheBytes: 134217728}}
    drainSeconds: 5
  trainers:
    microBatchTokens: 1024
  weightTransfer:
    backend: gloo # nccl on GPUs
"""
