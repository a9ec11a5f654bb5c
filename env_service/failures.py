"""Why a rollout came to nothing. The two kinds decide whether the learner tries the lease again."""


class RolloutFailure(Exception):
    """The base of both kinds; the text is the reason that the learner records."""

    data_fault: bool


class InfrastructureFailure(RolloutFailure):
    """A process died, was silent or answered nonsense: the same lease may well succeed later or elsewhere."""

    data_fault = False


class Unavailable(InfrastructureFailure):
    """Nobody took the request up, or nobody answers: it says nothing about the request, which is asked again until
    the rollout's time is over.
    """


class DataFailure(RolloutFailure):
    """The task cannot be rolled out: its environment, its prompt or its verifier is at fault."""

    data_fault = True
