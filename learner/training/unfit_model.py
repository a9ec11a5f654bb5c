"""The error of a model that the settings do not fit."""

from services.process import WrongSettings


class UnfitModel(WrongSettings, ValueError):
    """The model cannot be trained as the settings ask; the text says why, and what to do."""
