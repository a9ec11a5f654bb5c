"""The shared form of everything on the wire: frozen, strict, and closed to unknown fields."""

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A frozen record. An unknown field, or a value of another type, is an error and never coerced."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants")
