"""The base of the JSON that the parts of Flipwatch exchange and keep."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Strict and closed: an unknown field or a wrong type is an error on both sides."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
