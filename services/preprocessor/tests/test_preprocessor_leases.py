"""Sessions of actors."""

from pipelinerl_preprocessor.leases import Sessions


def test_sessions_are_replaced_and_forgotten() -> None:
    sessions = Sessions(forget_s=10.0)
    assert sessions.seen("a", "1", now=0.0)
    assert not sessions.seen("a", "1", now=1.0)
    assert sessions.seen("a", "2", now=2.0)
    assert (
        sessions.is_current("a", "1"),
        sessions.is_current("a", "2"),
        sessions.is_current("b", "9"),
    ) == (False, True, True)
    sessions.forget_silent(now=11.9)
    assert len(sessions) == 1
    sessions.forget_silent(now=12.0)
    assert len(sessions) == 0
