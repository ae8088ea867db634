import pytest

from sparse_mla_verify.evidence import json_files


def test_a_record_is_read_as_it_was_written(tmp_path):
    path, plain = tmp_path / "folder" / "x.json", {"schema": 1, "list": [[1, 2], {"a": None}]}
    json_files.write_lines(path, plain)
    assert path.read_text() == '{\n"schema": 1,\n"list": [\n [1, 2],\n {"a": null}\n]\n}\n'
    assert json_files.read(path, "a record", dict, 1) == plain
    json_files.write(path, {"a": 1})
    assert path.read_text() == '{\n "a": 1\n}\n'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "the file must hold an object, got a list"),
        ("{}", "schema must be 2, got None"),
        ('{"schema": 1}', "schema must be 2, got 1"),
        ('{"schema": 2}', "no 'part'$"),
        ('{"schema": 2, "part": 1}', "object is not"),
    ],
)
def test_a_file_of_another_kind_is_an_error_that_says_why(content, why, tmp_path):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"path must be a record, got .*x\.json: .*{why}"):
        json_files.read(path, "a record", lambda plain: list(plain["part"]), 2)
