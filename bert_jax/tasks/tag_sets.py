"""The set of tags of a head: its scheme, and the tags of a file converted to it or refused."""

from collections.abc import Sequence

from bert_jax.tasks.conll import Sentence, convert_tags, find_scheme
from bert_jax.tasks.labels import sort_labels
from bert_jax.tasks.tagging_scores import are_plain, find_entities, find_runs, split_tag


def scheme_of_labels(labels: Sequence[str]) -> str:
    """Returns the scheme of the labels of a head that stores none, as an imported one."""
    if are_plain(labels):
        return "io"
    prefixes = {split_tag(label)[0] for label in labels}
    if prefixes & {"E", "S"}:
        return "bioes"
    return "bilou" if prefixes & {"L", "U"} else "iob2"


def check_labels(labels: Sequence[str], scheme: str) -> None:
    """Raises ValueError if `labels`, of a head or given as a flag, are not in `scheme`."""
    if scheme == "none" or not labels:
        return
    if are_plain(labels) != (scheme == "io"):
        kind, fix = ("plain tags", "io") if scheme != "io" else ("tags with prefixes", "iob2")
        fix += ", or none if they mark no entities"
        raise ValueError(f"{', '.join(labels)} are {kind}: set config.data.scheme={fix}")
    found = scheme_of_labels(labels)
    if found in ("bioes", "bilou") and scheme != found:
        names = ", ".join(labels)
        raise ValueError(f"{names} are {found.upper()} tags: set config.data.scheme={found}")


def convert_sentences(
    path: str, sentences: Sequence[Sentence], scheme: str, repair: bool
) -> tuple[list[Sentence], dict[str, int]]:
    """Returns the sentences with their tags in `scheme`, and counts for the notes.

    Raises ValueError if the file has plain tags, but `scheme` has prefixes, or as `find_scheme`.
    """
    original, num_repaired = find_scheme(path, sentences, repair)
    if original == "io" and all(tag.isdigit() for sentence in sentences for tag in sentence.tags):
        raise ValueError(
            f"{path}: the tags are numbers without names: list the names in their order, such as "
            "config.data.labels=O,B-PER,I-PER, or set scheme=none to predict the numbers"
        )
    if original == "io" and scheme != "io":
        tags = sorted({tag for sentence in sentences for tag in sentence.tags})
        raise ValueError(
            f"{path}: the tags {_listed(tags)} have no prefixes, such as B- and I-: set "
            "config.data.scheme=io if a run of equal tags is an entity, or scheme=none if tags, "
            "such as parts of speech, mark no entities"
        )
    find = find_runs if original == "io" else find_entities
    converted = [each._replace(tags=convert_tags(each.tags, scheme, find)) for each in sentences]
    counts = {f"sentences in {original.upper()}": len(sentences)}
    if repair:
        counts["tags repaired"] = num_repaired
    if scheme == "io":
        pairs = zip(sentences, converted, strict=True)
        merged = sum(len(find(old.tags)) - len(find_runs(new.tags)) for old, new in pairs)
        counts["entities joined to an adjacent one, as IO cannot separate them"] = merged
    return converted, counts


def _listed(texts: Sequence[str]) -> str:
    """Returns the first ten of the texts, for a message."""
    return ", ".join(texts[:10]) + ", ..." * (len(texts) > 10)


def find_tag_set(sentences: Sequence[Sentence], scheme: str) -> tuple[str, ...]:
    """Returns "O" and all tags of `scheme` for the types that occur; if "none", the tags found.

    Raises ValueError if the sentences have only one distinct tag.
    """
    tags = {tag for sentence in sentences for tag in sentence.tags}
    if len(tags) < 2:
        raise ValueError(f"train has a single tag, {tags.pop()!r}: expected several in tag_column")
    if scheme == "none":
        return sort_labels(tags)
    if scheme == "io":
        return ("O", *sort_labels(tags - {"O"}))
    types = sorted({split_tag(tag)[1] for tag in tags - {"O"}})
    prefixes = {"bioes": "BIES", "bilou": "BILU"}.get(scheme, "BI")
    return ("O", *(f"{prefix}-{type_name}" for type_name in types for prefix in prefixes))


def check_tags(
    path: str, original: Sequence[Sentence], converted: Sequence[Sentence], labels: tuple[str, ...]
) -> None:
    """Raises ValueError if a `converted` tag is not in `labels`; quotes the `original` tag too."""
    for before, after in zip(original, converted, strict=True):
        for line, tag, trained in zip(before.lines, before.tags, after.tags, strict=True):
            if trained not in labels:
                trained = "" if trained == tag else f", trained as {trained!r},"
                raise ValueError(
                    f"{path}, line {line}: tag {tag!r}{trained} is not one of the labels "
                    f"{', '.join(labels)}: fix it, or list all tags in config.data.labels"
                )
