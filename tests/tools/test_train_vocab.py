import json

import pytest

from bert_jax.tools import train_vocab

PAGE = "<page><title>T</title><ns>0</ns><revision><text>{}</text></revision></page>"


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
@pytest.mark.parametrize(
    "text",
    [
        "東京は日本の首都であり、世界でも有数の大都市である。",
        "กรุงเทพมหานคร เป็นเมืองหลวงของประเทศไทย",
    ],
)
def test_a_dump_in_a_language_without_spaces_gives_a_vocabulary(tmp_path, kind, text):
    path = tmp_path / "wiki.xml"
    path.write_text(f"<mediawiki>{PAGE.format(text) * 20}</mediawiki>")
    content = train_vocab.train_vocabulary([str(path)], kind, 150, False, num_processes=1)
    assert all(character.encode() in content for character in set(text) - set(" 、。"))


def test_json_lines_without_text_are_counted_and_many_are_refused(tmp_path, capsys):
    lines = [json.dumps({"body": f"the old king of {number}"}) for number in range(200)]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join([*lines, "not JSON"]) + "\n")
    arguments = [str(path)], "wordpiece", 100, True, 1
    assert b"king" in train_vocab.train_vocabulary(*arguments, text_field="body")
    assert "lines without text in 'body', not trained on: 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"201 of 201 lines .* have no text in 'text'.*name the"):
        train_vocab.train_vocabulary(*arguments)
