"""The environment of NCCL's communicators."""

from services.nccl import environment_of_nccl, failure_of, interface_of, keep_to_interface_of


def test_a_communicator_of_broadcasts_is_made_with_settings_that_leave_no_trace() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PATH": "/bin"}
    before = dict(environ)
    with environment_of_nccl(timeout_s=10.0, environ=environ):
        assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "the watchdog ends no process"
        assert environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "10"
        assert environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    assert environ == before
    blocking = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}
    with environment_of_nccl(timeout_s=10.0, environ=blocking):
        assert blocking["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0", "a user's choice"


def test_the_interface_is_that_of_the_address_unless_one_is_named() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("192.0.2.1") is None
    environ: dict[str, str] = {}
    keep_to_interface_of("192.0.2.1", environ=environ)
    assert environ == {}
    keep_to_interface_of("127.0.0.1", environ=environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "=lo"}
    named = {"NCCL_SOCKET_IFNAME": "ib0"}
    keep_to_interface_of("127.0.0.1", environ=named)
    assert named == {"NCCL_SOCKET_IFNAME": "ib0"}


class CollectiveWithError:
    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def exception(self) -> Exception | None:
        if isinstance(self._failure, TypeError):
            raise self._failure
        return self._failure


def test_a_collective_says_why_it_failed_on_one_line_and_nothing_if_it_did_not() -> None:
    assert failure_of(CollectiveWithError(RuntimeError("remote process\n exited"))) == "remote process exited"
    assert failure_of(CollectiveWithError(None)) == ""
    assert failure_of(CollectiveWithError(TypeError("an older torch has no type for it"))) == ""
