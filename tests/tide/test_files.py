"""Files that are written whole or not at all."""

import pytest

from tide.files import replacing, write_text


def test_text_is_written_and_replaced(tmp_path):
    file = tmp_path / "a.txt"
    for text in ("first\n", "zweite ü\n"):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "a.txt"
    write_text(file, "old")

    def fail_half_way():
        with replacing(file) as temporary:
            temporary.write_text("new")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
