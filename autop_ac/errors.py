"""One tree of exceptions: catch `AutopACError` to catch whatever this library refuses."""


class AutopACError(Exception):
    """Base of every error that autop_ac raises on purpose."""


class ConfigError(AutopACError, ValueError):
    """A setting is out of range, misspelt, or contradicts another; raised when it is made."""


class HintError(AutopACError):
    """Two hints in one region or one rule set contradict each other."""


class CaptureError(AutopACError):
    """The model could not be traced into one joint forward and backward graph."""


class InfeasibleError(AutopACError):
    """No plan satisfies the limits given.

    Attributes:
        budget_bytes: the limit asked for, in bytes, or None where the limit is not in bytes.
        smallest_bytes: the least that can be reached, in bytes, or None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        smallest_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class SolverError(AutopACError):
    """The optimiser stopped without a plan and without a proof that there is none."""


class PartitionError(AutopACError):
    """The values really kept from forward to backward are not those that were planned."""


class PlanFileError(AutopACError, ValueError):
    """A file holds no complete plan of a version that is read here.

    One that is not there is a `FileNotFoundError` as well.
    """


class UsageError(AutopACError, RuntimeError):
    """A call out of order, or on an object whose `with` block has ended."""
