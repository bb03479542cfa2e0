from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind


def test_every_failure_has_an_exit_code_of_its_name() -> None:
    assert {kind.name for kind in FailureKind} < {code.name for code in ExitCode}


def test_only_transient_failures_are_worth_a_restart() -> None:
    retried = [kind for kind in FailureKind if not ExitCode[kind.name].would_fail_again]
    assert retried == [FailureKind.PEER_LOST, FailureKind.INTERNAL]
    assert retried == [kind for kind in FailureKind if kind.transient]
