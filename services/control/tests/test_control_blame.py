from pipelinerl_common.generator_api import InitGroupResponse, UpdateResponse
from pipelinerl_common.generator_client import (
    BadAnswer,
    GeneratorError,
    GeneratorRefused,
    GeneratorUnavailable,
    NoAnswer,
)
from pipelinerl_control.transfer import TransferOutcome, blame_joins, blame_updates

JOINED = InitGroupResponse(epoch=1, ranks=[1])
SILENT = NoAnswer("no answer")


def ok(checksum: str = "c") -> UpdateResponse:
    return UpdateResponse(
        version=1, checksum=checksum, pause_s=0, transfer_s=0, apply_s=0, num_running=0
    )


def failed(status: int) -> GeneratorError:
    failure = GeneratorUnavailable if status >= 500 else GeneratorRefused
    return failure(f"HTTP {status}", status)


def test_join_that_timed_out_waiting_for_a_silent_one_is_not_to_blame() -> None:
    failure = blame_joins({"a": failed(504), "b": SILENT, "c": JOINED})
    assert failure is not None
    assert failure.culprits == {"b": "no answer"}


def test_joins_that_all_timed_out_are_nobodys_fault() -> None:
    failure = blame_joins({"a": failed(504), "b": failed(504)})
    assert failure is not None
    assert failure.culprits == {}


def test_joins_that_all_succeeded_are_no_failure() -> None:
    assert blame_joins({"a": JOINED, "b": JOINED}) is None
    assert blame_joins({}) is None


def test_silent_member_is_expelled_and_those_it_took_along_are_not() -> None:
    assert blame_updates({"a": failed(500), "b": SILENT, "c": failed(504)}, {"a", "b", "c"}) == {
        "b": "no answer"
    }


def test_refusing_member_is_expelled_and_those_that_waited_for_it_are_not() -> None:
    assert list(blame_updates({"a": failed(500), "b": failed(409)}, {"b"})) == ["b"]


def test_member_whose_answer_breaks_the_contract_is_expelled() -> None:
    broken = BadAnswer("not the expected answer", 200)
    assert list(blame_updates({"a": failed(500), "b": broken}, {"a", "b"})) == ["b"]


def test_first_server_error_is_the_culprit_after_an_abort() -> None:
    assert list(blame_updates({"a": failed(500), "b": failed(500)}, {"a"})) == ["a"]


def test_member_with_another_checksum_is_expelled() -> None:
    answers = {"a": ok("x"), "b": ok("x"), "c": ok("y")}
    expelled = blame_updates(answers, set())
    assert list(expelled) == ["c"]
    assert TransferOutcome(answers, expelled, aborted=False).published


def test_update_is_published_only_when_a_remaining_member_serves_it_and_all_do() -> None:
    assert TransferOutcome({"a": ok(), "b": SILENT}, {"b": "no answer"}, aborted=False).published
    assert not TransferOutcome(
        {"a": failed(500), "b": SILENT}, {"b": "no answer"}, aborted=True
    ).published
    assert not TransferOutcome({"a": SILENT}, {"a": "no answer"}, aborted=False).published
