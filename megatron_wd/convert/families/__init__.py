"""The families that can be converted. A new one is one file here, and one line below."""

from collections.abc import Mapping

from megatron_wd.config import UserError
from megatron_wd.convert.families import gpt2, llama2, olmo2
from megatron_wd.convert.families.base import ConvertedFamily

CONVERTED: Mapping[str, ConvertedFamily] = {
    "llama2": llama2.FAMILY,
    "olmo2": olmo2.FAMILY,
    "gpt2": gpt2.FAMILY,
}


def converted_family(name: str) -> ConvertedFamily:
    """Returns what the converter knows of a family.

    Args:
        name: Name of the family, as in `model.family`.

    Raises:
        UserError: If the family cannot be converted.
    """
    if name not in CONVERTED:
        known = ", ".join(sorted(CONVERTED))
        raise UserError(f"model.family {name!r} cannot be converted; these can: {known}.")
    return CONVERTED[name]
