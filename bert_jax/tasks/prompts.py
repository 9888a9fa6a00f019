"""The prompts of an embedding head: texts that precede every query, and every passage.

A head has them as sentence-transformers does: "prompts" by name, and as "prompt" the text of that
which precedes a text if none is named.
"""

from collections.abc import Mapping

NAMES = ("query", "document")
"""What texts may be: `document` is a passage."""
# Models store the prompt of passages under one of these names.
_SYNONYMS = {"query": ("query",), "document": ("document", "passage", "corpus")}


def prompt_settings(query_prompt: str, passage_prompt: str) -> dict:
    """Returns the settings of a head that is trained with prompts; none if both are empty."""
    if not query_prompt and not passage_prompt:
        return {}
    prompts = {"query": query_prompt, "document": passage_prompt}
    return {"prompts": prompts} | ({"prompt": passage_prompt} if passage_prompt else {})


def find_prompt(settings: Mapping, name: str | None = None) -> str:
    """Returns the prompt of a head by its name: any of its own, or of `NAMES`; "" if it has none.

    A head without a prompt for queries, or passages, has the same for all texts. Raises ValueError
    for an unknown name.
    """
    default, prompts = settings.get("prompt", ""), settings.get("prompts", {})
    if name is None:
        return default
    known = (prompts[each] for each in _SYNONYMS.get(name, (name,)) if each in prompts)
    if (prompt := next(known, None)) is not None:
        return prompt
    if name not in NAMES:
        expected = ", ".join(dict.fromkeys((*NAMES, *prompts)))
        raise ValueError(f"there is no prompt {name!r}: expected {expected}")
    return default
