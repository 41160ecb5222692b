"""A job's settings by their paths, so that two jobs can be told apart."""

from typing import Any

from pipelinerl_common.settings import Job


def flat_settings(job: Job) -> dict[str, Any]:
    """Those below spec. Example: {"algorithm.optimizer.learningRate": 0.0002, "model.adapter":
    None, ...}.
    """
    return _flat(job.model_dump(mode="json", by_alias=True)["spec"])


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, dict) and node:
        return {
            key: value
            for name, child in node.items()
            for key, value in _flat(child, f"{path}{name}.").items()
        }
    return {path.rstrip("."): node}
