"""Complaints about `true` and `false` where a number is wanted, which Python would count with as with 1 and 0."""

from collections.abc import Iterator, Mapping

from services.config.options import OptionSchema
from services.config.run_paths import item_of, models_of, parts_of
from services.config.sources import SourcedSetting


def truths_for_numbers(settings: Mapping[str, SourcedSetting], schema: OptionSchema) -> Iterator[str]:
    """A complaint for each such setting, with its place; `steps = true` would be a run of one step."""
    for key, setting in settings.items():
        if key in schema.options:
            for path, value in _truths(setting.value, schema.options[key].annotation, ""):
                yield f"{setting.origin}:{path} got {str(value).lower()}: expected a number"


def _truths(value: object, annotation: object, path: str) -> Iterator[tuple[str, bool]]:
    kinds = parts_of(annotation)
    if isinstance(value, bool):
        if bool not in kinds and (int in kinds or float in kinds):
            yield path and f" {path}:", value
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            name = each.get("name", number) if isinstance(each, dict) else number
            yield from _truths(each, item_of(annotation), f"{path}.{name}".lstrip("."))
    elif isinstance(value, dict):
        fields = {name: info for model in models_of(annotation) for name, info in model.model_fields.items()}
        for key, each in value.items():
            if key in fields:
                yield from _truths(each, fields[key].annotation, f"{path}.{key}".lstrip("."))
