"""Checks between fields. (First version: being written.)"""

from megatron_wd.config.schema import Config


def validate(config: Config) -> None:
    """Raises UserError for fields that disagree."""


def validate_world(config: Config, world_size: int) -> None:
    """Raises UserError where the layout does not divide `world_size` ranks."""
