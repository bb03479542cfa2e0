"""A link to a model's page on the hub, as people copy it, in place of the model's name."""

import re
from typing import Final

_LINK: Final = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)"
    r"(?:models/)?(?P<name>[^/?#\s]+/[^/?#\s]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/?#\s]+))?(?:[/?#]\S*)?"
)


def hub_name(model: str) -> tuple[str, str | None]:
    """The hub id and, where the link names one, the revision; anything else as it is."""
    found = _LINK.fullmatch(model.strip())
    return (model, None) if found is None else (found["name"], found["revision"])
