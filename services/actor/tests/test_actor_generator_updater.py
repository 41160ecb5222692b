"""The order of an update, and which failures the generator survives."""

from dataclasses import replace

import pytest
from actor_generator_fakes import FakeEngine

from pipelinerl_actor.generator.engine import KVCache, Transfer
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.generator.updater import WeightUpdate, WeightUpdater
from pipelinerl_actor.generator.weight_layout import ManifestMismatch, WeightLayout
from pipelinerl_common.errors import FatalError, Refused
from pipelinerl_common.generator_api import InitGroupRequest, UnknownManifest
from pipelinerl_weights.errors import TransferAborted, TransferTimeout
from pipelinerl_weights.manifest import Manifest, TensorSpec

MANIFEST = Manifest((TensorSpec("w", "float32", (2, 3)),), 1024)
GROUP = InitGroupRequest(
    epoch=7,
    master_address="127.0.0.1",
    master_port=1234,
    rank_offset=1,
    world_size=2,
    backend="gloo",
    timeout_s=5.0,
)
NEXT_GROUP = GROUP.model_copy(update={"epoch": 8})


def update(version: int = 1, mode: str = "staged", **fields: object) -> WeightUpdate:
    values: dict[str, object] = {
        "kv_cache": KVCache.KEEP,
        "allow_rollback": False,
        "epoch": 7,
        **fields,
    }
    return WeightUpdate(transfer=Transfer(version, MANIFEST, 5.0), mode=mode, **values)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def updater(engine: FakeEngine) -> WeightUpdater:
    made = WeightUpdater(
        engine,
        WeightLayout({"w": (2, 3)}),
        GeneratorMetrics(),
        initial_version=-1,
        running=lambda: 3,
    )
    await made.join(GROUP)
    engine.verbs.clear()
    return made


async def test_a_staged_update_pauses_only_to_apply(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    report = await updater.update(update())
    assert engine.verbs == ["stage", "pause keep", "apply", "version 1", "resume"]
    assert (report.version, report.checksum, report.num_running, report.transfer_s) == (
        1,
        "00ff",
        3,
        1.0,
    )
    assert report.apply_s >= 0.25
    assert (updater.version, updater.checksum, updater.num_updates) == (1, "00ff", 1)


async def test_an_inplace_update_backs_up_first(engine: FakeEngine, updater: WeightUpdater) -> None:
    await updater.update(update(mode="inplace", kv_cache=KVCache.RECOMPUTE))
    assert engine.verbs == ["back_up", "pause recompute", "receive_in_place", "version 1", "resume"]


async def test_a_failed_transfer_before_the_pause_changes_nothing(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    engine.failing["stage"] = TransferAborted("the trainer left")
    with pytest.raises(TransferAborted, match="the trainer left"):
        await updater.update(update())
    assert engine.verbs == ["stage", "leave"]
    assert (updater.version, updater.epoch, updater.num_failures) == (-1, 0, 1)


async def test_a_failed_inplace_transfer_is_rolled_back(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    engine.failing["receive_in_place"] = TransferTimeout("too slow")
    with pytest.raises(TransferTimeout):
        await updater.update(update(mode="inplace"))
    assert engine.verbs == [
        "back_up",
        "pause keep",
        "receive_in_place",
        "roll_back",
        "resume",
        "leave",
    ]
    assert updater.version == -1


@pytest.mark.parametrize(
    ("mode", "failing"),
    [
        ("staged", {"apply": RuntimeError("device fault")}),
        ("staged", {"version 1": RuntimeError("engine gone")}),
        ("staged", {"resume": RuntimeError("engine gone")}),
        (
            "inplace",
            {"receive_in_place": TransferAborted("x"), "roll_back": RuntimeError("device fault")},
        ),
        ("inplace", {"version 1": RuntimeError("engine gone")}),
    ],
)
async def test_a_fault_while_weights_change_is_fatal(
    engine: FakeEngine, updater: WeightUpdater, mode: str, failing: dict[str, Exception]
) -> None:
    engine.failing.update(failing)
    with pytest.raises(FatalError):
        await updater.update(update(mode=mode))


@pytest.mark.parametrize(
    ("wanted", "error", "complaint"),
    [
        (update(epoch=6), Refused, "epoch 6 is not current: this generator is a member in epoch 7"),
        (update(version=0), Refused, "version 0 is older than 1"),
        (update(mode="staged"), ManifestMismatch, "second copy"),
    ],
)
async def test_refusals_touch_nothing(
    engine: FakeEngine,
    updater: WeightUpdater,
    wanted: WeightUpdate,
    error: type[Exception],
    complaint: str,
) -> None:
    await updater.update(update(version=1))
    engine.verbs.clear()
    engine.can_stage = "copy" not in complaint
    with pytest.raises(error, match=complaint):
        await updater.update(wanted)
    assert engine.verbs == []
    assert (updater.version, updater.epoch) == (1, 7)


async def test_a_manifest_is_known_from_the_groups_first_update_to_the_next_group(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    with pytest.raises(UnknownManifest, match="unknown in epoch 7"):
        updater.known_manifest(MANIFEST.hash)
    await updater.update(update(version=1))
    assert updater.known_manifest(MANIFEST.hash) == MANIFEST
    with pytest.raises(UnknownManifest):
        updater.known_manifest("another")
    await updater.join(NEXT_GROUP)
    with pytest.raises(UnknownManifest, match="unknown in epoch 8"):
        updater.known_manifest(MANIFEST.hash)


async def test_a_manifest_that_does_not_fit_is_not_remembered(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    wrong = Manifest((TensorSpec("w", "float32", (3, 3)),), 1024)
    with pytest.raises(ManifestMismatch):
        await updater.update(replace(update(), transfer=Transfer(1, wrong, 5.0)))
    with pytest.raises(UnknownManifest):
        updater.known_manifest(wrong.hash)
    assert engine.verbs == []


async def test_going_back_needs_permission(engine: FakeEngine, updater: WeightUpdater) -> None:
    await updater.update(update(version=5))
    await updater.update(update(version=2, allow_rollback=True))
    await updater.update(update(version=2))
    assert updater.version == 2


async def test_only_newer_groups_are_joined(engine: FakeEngine, updater: WeightUpdater) -> None:
    with pytest.raises(Refused, match="epoch 7 is not newer than 7"):
        await updater.join(GROUP)
    assert engine.verbs == []


async def test_a_group_that_cannot_be_joined_leaves_none(
    engine: FakeEngine, updater: WeightUpdater
) -> None:
    engine.failing["join"] = TransferTimeout("rank 0 did not join in time")
    with pytest.raises(TransferTimeout):
        await updater.join(NEXT_GROUP)
    assert updater.epoch == 0
