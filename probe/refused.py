"""The one refusal that a worker answers with."""


class Refused(Exception):
    """The operation is not possible; `status` is the HTTP status that says why."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
