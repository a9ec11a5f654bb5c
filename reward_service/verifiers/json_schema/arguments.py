"""The arguments of `json_schema`, apart from its code so that the service need not load jsonschema."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Place = Literal["fenced", "last_value", "whole"]
Draft = Literal["2020-12", "2019-09", "7", "6", "4"]
JsonSchema = dict[str, JsonValue] | bool


class JsonSchemaArguments(BaseModel):
    """The schema, and how the value is found and judged."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    # The wire calls it `schema`, a name that pydantic's models already use.
    json_schema: JsonSchema = Field(
        alias="schema", description="a JSON Schema; references must lead into itself or a draft's own schema"
    )
    draft: Draft = Field("2020-12", description="draft of a schema that does not name its own in $schema")
    extract: tuple[Place, ...] = Field(
        ("fenced", "whole"),
        min_length=1,
        strict=False,
        description="where the value is: the first place that there is. fenced: the last block fenced as json, or "
        "without a language; last_value: the last object or array, between any text; whole: all of the text",
    )
    partial: bool = Field(
        False,
        description="reward of an object that is not valid: valid required properties / (required properties + 1)",
    )
    allow_duplicate_keys: bool = Field(False, description="take an object with a key twice, and the last value of it")
    allow_nan: bool = Field(False, description="take NaN and Infinity, which are not JSON")
    strip_thinking: bool = Field(True, description="judge only what stands after the last </think>")
