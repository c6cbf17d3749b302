"""Errors in words: short, and never without the reason."""

import errno
import os

import pytest

from maxlite.checkpoint.errors import in_words

PATH = "/a/very/long/path" * 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("text", ["{0}", "{1} {0}", "{0} {1}", "{1} {0} {1}"])
def test_the_reason_is_there_wherever_the_library_says_it(number, text):
    reason = os.strerror(number)
    words = in_words(ValueError(text.format(reason, PATH)))
    assert reason in words
    assert len(words) < 400


def test_an_error_of_the_system_is_its_reason_and_its_file():
    assert in_words(OSError(errno.ENOSPC, "No space left on device", "/f")) == "No space left on device: /f"
