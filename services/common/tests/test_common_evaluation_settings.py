"""`spec.evaluation`: every rejection names the field, the value and the remedy. Checkpoints from a
reader's side.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl_common.checkpoints import complete_checkpoints, files_of
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import Job, cluster_only_paths, parse_job, service_view

HELD_OUT = {"name": "held-out", "path": "tasks:Sums"}


def parse(evaluation: dict[str, Any], **spec: Any) -> Job:
    document = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "sums"},
        "spec": {
            "model": {"uri": "tiny://arithmetic"},
            "task": {"path": "tasks:Sums"},
            "trainers": {"checkpoint": {"everySteps": 10}},
            "evaluation": {"everySteps": 20, "sets": [HELD_OUT], **evaluation},
            **spec,
        },
    }
    return parse_job(document, "job.yaml")


def test_two_fields_are_enough() -> None:
    evaluation = parse({}).spec.evaluation
    assert evaluation is not None
    assert (evaluation.at_start, evaluation.generator, evaluation.timeout_seconds) == (
        True,
        None,
        1800,
    )
    (held_out,) = evaluation.sets
    assert (held_out.args, held_out.num_prompts, held_out.samples_per_prompt, held_out.pass_at) == (
        {},
        200,
        1,
        [1],
    )


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        (
            {"everySteps": 0},
            "evaluation.everySteps: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            {"everySteps": 25},
            "evaluation.everySteps=25 must be a multiple of trainers.checkpoint.everySteps=10",
        ),
        ({"sets": []}, "evaluation.sets: List should have at least 1 item"),
        (
            {"sets": [{**HELD_OUT, "name": str(number)} for number in range(9)]},
            "List should have at most 8 items",
        ),
        (
            {"sets": [HELD_OUT, HELD_OUT]},
            "evaluation.sets: several are called 'held-out'; give each a name of its own",
        ),
        (
            {"sets": [{**HELD_OUT, "name": "a=b"}]},
            "evaluation.sets.0.name: String should match pattern",
        ),
        (
            {"sets": [{**HELD_OUT, "path": "tasks"}]},
            "evaluation.sets.0.path: 'tasks' is not of the form 'package.module:Name'",
        ),
        ({"sets": [{**HELD_OUT, "numPrompts": 0}]}, "evaluation.sets.0.numPrompts"),
        ({"sets": [{**HELD_OUT, "passAt": []}]}, "evaluation.sets.0.passAt"),
        (
            {"sets": [{**HELD_OUT, "samplesPerPrompt": 4, "passAt": [1, 8]}]},
            "passAt 8 of the set 'held-out' needs samplesPerPrompt of at least 8, not 4",
        ),
        (
            {"sets": [{**HELD_OUT, "passAt": [1, 1]}]},
            "passAt=[1, 1] of the set 'held-out' names one k twice",
        ),
        (
            {"sets": [{**HELD_OUT, "sampling": {"maxTokens": 4096}}]},
            "sampling.maxTokens=4096 of the evaluation set 'held-out' leaves no room for a prompt "
            "in model.maxModelLen=4096",
        ),
        (
            {"timeoutSeconds": 0},
            "evaluation.timeoutSeconds: Input should be greater than 0 (got 0)",
        ),
        ({"everyStep": 10}, "evaluation.everyStep: unknown field; did you mean 'everySteps'?"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluation: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(evaluation)
    assert says in str(refused.value)


def test_without_checkpoints_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(
        SettingsError,
        match=r"checkpoint\.everySteps=0, which must be above 0: checkpoints are what",
    ):
        parse({}, trainers={"checkpoint": {"everySteps": 0}})


def test_what_only_kubernetes_reads_is_kept_from_services() -> None:
    job = parse(
        {
            "image": "mine:1",
            "podTemplate": {"spec": {"nodeName": "a"}},
            "sets": [{**HELD_OUT, "args": None}],
        }
    )
    assert cluster_only_paths(job.spec) == ["evaluation.image", "evaluation.podTemplate"]
    seen = service_view(job.spec)["evaluation"]
    assert not {"image", "podTemplate"} & seen.keys()
    assert seen["sets"][0]["args"] == {}


def checkpoint(root: Path, step: int, **files: str) -> Path:
    folder = root / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    sizes = {name: len(text) for name, text in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": sizes}))
    return folder


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert list(complete_checkpoints(tmp_path)) == []
    for step in (100, 20, 3):
        checkpoint(tmp_path, step, weights="abc")
    torn, missing, odd = (checkpoint(tmp_path, step, weights="abc") for step in (110, 120, 130))
    (torn / "weights").write_text("ab")
    (missing / "weights").unlink()
    (odd / "manifest.json").write_text("[]")
    (tmp_path / "checkpoints" / ".step-140.partial").mkdir()
    (tmp_path / "checkpoints" / "step-last").mkdir()
    assert list(complete_checkpoints(tmp_path)) == [100, 20, 3]
    assert list(complete_checkpoints(tmp_path, above=20)) == [100]
    assert files_of(tmp_path / "checkpoints" / "step-20") == {"weights": 3}
    assert files_of(torn) is None


def test_a_checkpoint_is_read_only_when_those_above_it_will_not_do(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        checkpoint(tmp_path, step, weights="abc")
    found = complete_checkpoints(tmp_path)
    assert next(found) == 100
    (tmp_path / "checkpoints" / "step-20" / "weights").unlink()
    assert list(found) == [3]
