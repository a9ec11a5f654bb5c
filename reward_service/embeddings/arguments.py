"""What a task may say to a similarity of embeddings."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1, max_length=1 << 20)]


class SimilarityArguments(BaseModel):
    """What the completion is compared with."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    references: tuple[Text, ...] = Field(
        min_length=1, max_length=64, strict=False, description="texts that the completion should be close to in meaning"
    )
    pick: Literal["best", "mean"] = Field(
        default="best", description="of several references: the closest one's similarity, or the mean"
    )
