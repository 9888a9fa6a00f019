"""Writes the sections of a report as Markdown with SVG files, and as one HTML page.

A section is a title and blocks: texts, tables, code, legends and plots.
"""

import base64
import html
from collections.abc import Sequence
from typing import NamedTuple

TITLE = "Sweep of fine-tuning hyperparameters"
CSS = """
body { color: #222; background: #fff; font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 90rem; padding: 1rem; overflow-wrap: anywhere; }
h1, h2 { font-weight: 600; line-height: 1.25; }
h2 { margin-top: 2.5rem; }
p { max-width: 60rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums;
  margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; overflow-wrap: normal; padding: .3rem 1.2rem .3rem 0;
  text-align: left; vertical-align: top; }
th { color: #555; font-weight: 600; vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; }
.notes { min-width: 12rem; }
.value { overflow-wrap: anywhere; }
pre { background: #f5f5f5; font-size: .8125rem; margin: 1rem 0; overflow-x: auto;
  padding: .8rem 1rem; }
.legend { font-size: .875rem; list-style: none; margin: 0; padding: 0; }
.legend li { border-left: 1rem solid; margin: .4rem 0; padding-left: .6rem; }
.legend span { color: #222; }
.panels { display: grid; gap: 1.5rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.beside { align-items: center; display: grid; gap: 1.5rem; margin: 1rem 0; }
img { display: block; height: auto; width: 100%; }
img.wide { min-width: 38rem; }
@media (min-width: 64rem) { .beside { grid-template-columns: 2fr 1fr; } }
"""


class Table(NamedTuple):
    """A header and rows of texts."""

    rows: Sequence[Sequence[str]]


class Code(NamedTuple):
    """Lines of a program or of commands."""

    text: str
    language: str


class Legend(NamedTuple):
    """What colors mean: pairs of a color, such as #0072b2, with its name, and a text."""

    entries: Sequence[tuple[tuple[str, str], str]]


class Plot(NamedTuple):
    """A plot; `is_wide` if it is read at no less than its own width."""

    name: str
    svg: str
    is_wide: bool = False

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '_')}.svg"


class Beside(NamedTuple):
    """A plot with its legend beside it, or below it on a narrow screen."""

    plot: Plot
    legend: Legend


Block = str | Table | Code | Legend | Beside | list[Plot]


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]

    @property
    def plots(self) -> list[Plot]:
        plots = []
        for block in self.blocks:
            plots += [block.plot] if isinstance(block, Beside) else []
            plots += block if isinstance(block, list) else []
        return plots


def markdown_page(sections: Sequence[Section]) -> str:
    """Returns the page as Markdown, which refers to the files of its plots."""
    parts = [f"# {TITLE}"]
    for section in sections:
        parts += [f"## {section.title}", *map(markdown_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def markdown_block(block: Block) -> str:
    match block:
        case str():
            return block
        case Table(rows):
            lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
            return "\n".join(f"| {' | '.join(line).replace(chr(10), ' ')} |" for line in lines)
        case Code(text, language):
            return f"```{language}\n{text}\n```"
        case Legend(entries):
            return "\n".join(f"- {name}: {text}" for (_, name), text in entries)
        case Beside(plot, legend):
            return f"{markdown_block([plot])}\n\n{markdown_block(legend)}"
        case list():
            return "\n\n".join(f"![{plot.name}]({plot.file})" for plot in block)


def html_page(sections: Sequence[Section]) -> str:
    """Returns the page as HTML that requests no other file."""
    parts = [
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{TITLE}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{CSS}</style>\n<h1>{TITLE}</h1>",
    ]
    for section in sections:
        parts += [f"<h2>{html.escape(section.title)}</h2>", *map(html_block, section.blocks)]
    return "\n".join([*parts, "</html>\n"])


def html_block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{html.escape(block)}</p>"
        case Table(rows):
            return html_table(rows)
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Legend(entries):
            items = (
                f'<li style="border-color: {color}"><span>{html.escape(text)}</span>'
                for (color, _), text in entries
            )
            return f"<ul class=legend>{''.join(items)}</ul>"
        case Beside(plot, legend):
            return f"<div class=beside>{html_image(plot)}{html_block(legend)}</div>"
        case list():
            images = "".join(map(html_image, block))
            return images if block[0].is_wide else f"<div class=panels>{images}</div>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, which scrolls where it is wider than the page."""
    classes = {"notes": "notes", "value": "value"}
    numbers = ["score", "median", "std", "min", "max", "examples", "precision", "recall", "f1"]
    numbers += ["importance"]
    numbers += [name for name in rows[0] if name.startswith(("predicted ", "train_fraction="))]
    classes |= dict.fromkeys(numbers, "number")
    lines = []
    for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True):
        cells = zip(rows[0], row, strict=True)
        texts = (f'<{tag} class="{classes.get(k, "")}">{html.escape(c)}' for k, c in cells)
        lines.append(f"<tr>{''.join(texts)}")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def html_image(plot: Plot) -> str:
    data = base64.b64encode(plot.svg.encode()).decode()
    kind = " class=wide" if plot.is_wide else ""
    image = f'<img alt="{html.escape(plot.name)}" src="data:image/svg+xml;base64,{data}"{kind}>'
    return f"<div class=scroll>{image}</div>"
